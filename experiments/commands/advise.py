from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import sparsify
from analysis import tables
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.files import write_atomic
from experiments.commands._arguments import SettingWords, parse_own_words
from experiments.commands._messages import iterate_with_progress, say
from experiments.commands._terminal import print_table
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.config.machines import LinkSettings
from experiments.prediction import step_times
from experiments.prediction.known_times import (
    ELEMENTS_BY_MODEL,
    NETWORK_SETTINGS,
    RANKED_METHODS,
    SEARCHES_LIKE,
    KnownTimes,
)
from experiments.prediction.step_times import Scenario, StepPrediction, UncertainTime, rank_methods
from sparsify.comm.direct import DIRECT_ALGORITHM
from sparsify.core.synthetic_selections import NUM_SLICES
from sparsify.cost import Network
from sparsify.methods import REGISTRY as METHODS
from sparsify.methods import per_step_names
from sparsify.ranges import (
    LARGEST_FLOAT,
    Constraint,
    NonNegativeFraction,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_value,
    describe_unknown,
)
from sparsify.replay import check_replayable

GROUP = "results"
SELECT_PREFIX = "select_s."
NUMBER = r"\d*\.?\d+(e-?\d+)?"
Seconds = (
    PositiveFloat
    | Annotated[str, Constraint(pattern=rf"^{NUMBER}\.\.{NUMBER}\Z", description="a range such as 0.1..0.2")]
)
Names = Annotated[str, Constraint(description="names with commas")]
Counts = Annotated[
    str,
    Constraint(
        pattern=r"^[1-9]\d{0,8}(,[1-9]\d{0,8})*\Z", description="numbers with commas, such as 1,15,30"
    ),
]
EVERY_OVER_DISTANCE = (1, 5, 15, 30)  # H, by default over a link with distance
Elements = Annotated[
    int, Constraint(ge=1, le=LARGEST_FLOAT, description="a whole number, or the name of a published model")
]
TYPE_BY_OWN_WORD: dict[str, Any] = {  # words that are no settings of a run
    "compute_s": Seconds,
    "parameters": Elements | str,
    "density": PositiveFraction,
    "overlap": NonNegativeFraction,
    "skew": Annotated[float, Constraint(ge=1, le=NUM_SLICES)],
    "methods": Names,
    "every": PositiveInt | Counts,
    SELECT_PREFIX: Seconds,
}
DEFAULT_DENSITY = 0.001


def advise(words: SettingWords, *, save: str | None = None) -> int:
    """Predict which method is the fastest on a cluster: `advise cluster=mine task=vgg16_cifar10`.

    The time of a step is that of computing, selecting and communicating. Computing and selecting times come
    from stored records of like runs, where there are any. Communicating is simulated on the cluster's link by
    the alpha-beta model. The command asks for numbers that are not known.

    Args:
        words: settings of a run: cluster=, task=, workers=, link=, inside= and so on. Other words are:
            compute_s=, the seconds of a step without selecting and communicating; select_s.METHOD=, the
            seconds that a method selects (both may be a range, as 0.1..0.2); parameters=, the elements of the
            model, or the name of a published one; density=, k/n; overlap=, the share of a selection that two
            workers have in common, and skew=; methods=, the methods, with commas (topk-fused: with the fused
            kernel); every=, H, or several with commas: each method averages the drift of H local steps, and
            is compared with dense in every step. Over a link with distance (alpha_s of 1 ms and more) every=
            is 1,5,15,30.
        save: the name of the files that are written.
    """
    config, values = _parse_words(words)
    known_times = KnownTimes(config, ResultFolders())
    scenario, unranked = make_scenario_and_list_unranked(values, known_times)
    model = values.get("parameters")
    if model not in ELEMENTS_BY_MODEL:
        model = str(config["task"]["name"])
    predictions = rank_methods(scenario, partial(iterate_with_progress, noun="methods"))
    table = make_prediction_table(predictions, scenario, known_times, model, unranked)
    print_table(table)
    cluster = config["cluster"]
    name = save or f"advise-{cluster['name']}-{cluster['link']['name']}-{model}-{config['workers']}w"
    folder = known_times.folders.figures
    tables.write_table_files([table], folder, name)
    write_atomic(folder / f"{name}.md", f"# {table.title}\n\n{table.to_markdown()}")
    say(str(folder / f"{name}.md"))
    return 0


def _parse_words(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the words that are settings, and the values of this command's own words."""
    values, settings = parse_own_words(words, {**TYPE_BY_OWN_WORD, "inside": str})
    inside = values.pop("inside", None)
    try:
        config = compose.resolve(settings).as_dict()
    except ValueError as error:
        own_words = ", ".join(key for key in TYPE_BY_OWN_WORD if key != SELECT_PREFIX)
        more = f"; advise also takes {own_words} and {SELECT_PREFIX}METHOD" if "no key" in str(error) else ""
        raise ValueError(f"{error}{more}") from error
    if inside:  # a run has it on virtual ranks only: real nodes have their own
        virtual = compose.resolve({"cluster": "virtual", "inside": inside}).as_dict()
        config["cluster"]["inside"] = virtual["cluster"]["inside"]
    if config["cluster"]["where"] == "slurm" and not any(word.startswith("workers=") for word in settings):
        config["workers"] = config["cluster"]["workers_per_node"]
    return config, values


def make_scenario_and_list_unranked(
    values: Mapping[str, Any], known_times: KnownTimes
) -> tuple[Scenario, list[str]]:
    """Return the scenario to predict, and the methods that can't be ranked.

    Raises:
        ValueError: a time or a size is neither given nor known.
    """
    config = known_times.config
    network = _make_network(config)
    task = config["task"]
    compute_time = _parse_time("compute_s", values) or known_times.find_compute_time()
    if compute_time is None:
        raise ValueError(
            f"how long task={task['name']} computes on {known_times.machine_label} is not known, for no "
            f"dense run of it with task.batch_size={task.get('batch_size')} and timing.mode=serialised "
            "is stored: give compute_s=SECONDS of a step's forward and backward pass and update, or make "
            f"one with `{_measuring_command(config)}`"
        )
    requested_methods = values["methods"].split(",") if "methods" in values else []
    for name in requested_methods:
        _check_method(name)
    elements = _find_elements(values, known_times)
    select_times = _find_select_times(values, known_times, elements)
    unknown = [name for name in requested_methods if name not in select_times and name != "dense"]
    if unknown:
        raise ValueError(
            f"how long {unknown[0]} takes to select on {known_times.machine_label} is not known, for no such "
            f"run is stored: give {SELECT_PREFIX}{unknown[0]}=SECONDS"
        )
    every = values.get("every", EVERY_OVER_DISTANCE if network.inter_node.propagation_s else 1)
    if isinstance(every, str):
        every = [int(number) for number in every.split(",")]
    scenario = Scenario(
        elements,
        config["workers"],
        values.get("density", DEFAULT_DENSITY),
        network,
        compute_time,
        {name: time for name, time in select_times.items() if name in (requested_methods or select_times)},
        (values["overlap"],) * 3 if "overlap" in values else step_times.DEFAULT_OVERLAP,
        values.get("skew", step_times.DEFAULT_SKEW),
        tuple(dict.fromkeys([every] if isinstance(every, int) else every)),
    )
    return scenario, [name for name in RANKED_METHODS if name not in select_times]


def _measuring_command(config: Mapping[str, Any]) -> str:
    """Return the command of a run that measures how long the task computes, on this machine or cluster."""
    place = config["cluster"]["name"] if config["cluster"]["where"] == "slurm" else "local"
    task = config["task"]
    described = compose.resolve({"task": task["name"]}).as_dict()["task"]
    batch = f" task.batch_size={task['batch_size']}" if "batch_size" in task else ""
    changed = [name for name in NETWORK_SETTINGS if task.get(name) != described.get(name)]
    network = "".join(f" task.{name}={task[name]}" for name in changed)
    return (
        f"python -m experiments run cluster={place} task={task['name']}{batch}{network} method=dense "
        "workers=2 timing.mode=serialised train.steps=30 train.validate=never"
    )


def _check_method(name: str) -> None:
    """Refuse a method that does not exist, that has local steps, or whose exchange can't be replayed."""
    method = name.partition("-")[0]
    METHODS.check_name(method)
    if method not in per_step_names():
        raise ValueError(
            f"methods={name}: local steps are asked for by every=H, which any method here takes; "
            "methods=dense every=30 is the exchange of DiLoCo"
        )
    check_replayable(sparsify.build(method))


def _make_network(config: Mapping[str, Any]) -> Network:
    """Return the network that joins the workers of a cluster."""
    cluster = config["cluster"]
    link = cluster["link"]
    if None in (link["alpha_s"], link["beta_s_per_byte"]):
        raise ValueError(
            f"cluster={cluster['name']}: link={link['name']} has no alpha and beta, so what communication "
            "takes can't be predicted; choose another link=, as ethernet_10g or nvlink3"
        )
    between = LinkSettings.from_dict(link).to_link("link")
    inside = cluster.get("inside")
    fast = LinkSettings.from_dict(inside).to_link("inside") if inside else None
    algorithm = DIRECT_ALGORITHM if between.propagation_s else "textbook"
    return Network(between, fast, int(cluster.get("workers_per_node") or 1), algorithm)


def _parse_time(name: str, values: Mapping[str, Any]) -> UncertainTime | None:
    """Return a time that was given, or a range of two; None where it was not given."""
    value = values.get(name)
    if not isinstance(value, str):
        return None if value is None else UncertainTime.around(value, "given")
    low, high = map(float, value.split(".."))
    check_value(name, low, PositiveFloat)
    check_value(name, high, Annotated[float, Constraint(ge=low, le=LARGEST_FLOAT)])
    return UncertainTime(low, (low * high) ** 0.5, high, "given")


def _find_elements(values: Mapping[str, Any], known_times: KnownTimes) -> int:
    """Return the number of elements of the model: as given, else as known."""
    if "parameters" in values:
        elements = ELEMENTS_BY_MODEL.get(values["parameters"], values["parameters"])
        if isinstance(elements, str):
            raise ValueError(describe_unknown("published model", elements, [*ELEMENTS_BY_MODEL]))
        check_value("parameters", elements, Elements)
        return int(elements)
    known_elements = known_times.find_elements()
    if known_elements is None:
        raise ValueError(
            f"how many parameters task={known_times.config['task']['name']} has is not known, for no dense "
            f"run of it is stored: give parameters=NUMBER, or one of {', '.join(ELEMENTS_BY_MODEL)}"
        )
    return known_elements


def _find_select_times(
    values: Mapping[str, Any], known_times: KnownTimes, elements: int
) -> dict[str, UncertainTime]:
    """Return selection times by method: as given, as known, or of a method that searches alike."""
    times = known_times.find_select_time_by_method(elements)
    for key in values:
        time = _parse_time(key, values) if key.startswith(SELECT_PREFIX) else None
        if time:
            name = key.removeprefix(SELECT_PREFIX)
            _check_method(name)
            times[name] = time
    for name, other in SEARCHES_LIKE.items():
        if name not in times and other in times:
            source = f"as {_label(other)}'s, which searches alike"
            times[name] = times[other]._replace(source=source)
    return dict(sorted(times.items()))


def _label(method: str) -> str:
    return style.method_style(method).label


def make_prediction_table(
    predictions: Sequence[StepPrediction],
    scenario: Scenario,
    known_times: KnownTimes,
    model: str,
    unranked: Sequence[str],
) -> tables.Table:
    """Return the predictions as a table with its title and note."""
    rows = []
    for prediction in predictions:
        method = _label(prediction.method)
        if scenario.has_local_steps:
            method += f", every {prediction.every} steps" if prediction.every > 1 else ", every step"
        rows.append(
            {
                "method": method,
                "step": prediction.step.scale_by(1e3),
                "computing": 1e3 * prediction.compute_s,
                "selecting": 1e3 * prediction.select_s,
                "communicating": 1e3 * prediction.transfer_s,
                "speed-up over dense": prediction.speedup,
                "density": 1.0 if prediction.method == "dense" else scenario.density,
                "matters most": prediction.widest_input,
            }
        )
    units = dict.fromkeys(("step", "computing", "selecting", "communicating"), "ms")
    cluster = known_times.config["cluster"]
    inside = f", inside={cluster['inside']['name']}" if cluster.get("inside") else ""
    title = (
        f"Predicted step times: {model}, {format_number(scenario.elements)} parameters, "
        f"{scenario.workers} workers, "
        f"cluster={cluster['name']}, link={cluster['link']['name']}{inside}"
    )
    return tables.Table.from_rows(title, rows, units, _make_note(scenario, known_times, unranked))


def _make_note(scenario: Scenario, known_times: KnownTimes, unranked: Sequence[str]) -> str:
    """Return the sources of the numbers, and all that the predictions leave out."""
    sources = [f"computing: {scenario.compute_time.source}"]
    sources += [f"{_label(name)}: {time.source}" for name, time in scenario.select_time_by_method.items()]
    least, _, most = scenario.overlap
    parts = [
        "Predicted, not measured; nothing overlaps, nobody is late. Where numbers come from: "
        f"{'; '.join(dict.fromkeys(sources))}. Communicating: simulated by the alpha-beta model. Intervals: "
        f"what the inputs may be off by, latency by a factor of {step_times.LATENCY_FACTOR:g}, bandwidth of "
        f"{step_times.BANDWIDTH_FACTOR:g}, a single measurement or a given number of "
        f"{step_times.GIVEN_FACTOR:g}, the others from the slowest to the quickest run; overlap of two "
        f"workers' selections {least:g} to {most:g}."
    ]
    network = scenario.network
    num_nodes = math.ceil(scenario.workers / network.workers_per_node)
    if known_times.config["cluster"]["where"] == "slurm" and num_nodes > 1 and network.intra_node is None:
        parts.append(
            f"The link joins all workers alike, also those of one of the {num_nodes} nodes: inside= says "
            "what these have."
        )
    if unranked:
        parts.append(
            f"Not ranked, for their selection was not measured on {known_times.machine_label}: "
            f"{captions.join_with_and(map(_label, unranked))} ({SELECT_PREFIX}METHOD=SECONDS gives it)."
        )
    if scenario.has_local_steps:
        parts.append(
            "Methods that average every so many steps select and communicate so rarely; what that does to "
            "the model is not predicted, nor what the outer step takes."
        )
    if network.inter_node.propagation_s:
        parts.append(
            "Everybody sends to everybody at once (collectives=direct), which over this link takes fewer "
            "ways than rings; a way is known within a tenth."
        )
    if scenario.compute_time.is_shipped:
        whose = "this cluster's" if known_times.config["cluster"]["where"] == "slurm" else "this machine's"
        parts.append(
            "The time of computing is of another machine, on which the repository's runs were made. One run "
            f"makes it {whose}: {_measuring_command(known_times.config)}"
        )
    return " ".join(parts)
