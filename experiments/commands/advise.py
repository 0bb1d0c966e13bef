from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import sparsify
from analysis import tables
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.records.files import write_atomic
from experiments.commands import _step_time_prediction
from experiments.commands._arguments import SettingWords, split_own_words
from experiments.commands._messages import say
from experiments.commands._step_time_prediction import (
    LISTED,
    MODELS,
    SEARCH_AS,
    Known,
    Prediction,
    Question,
    Range,
)
from experiments.commands._terminal import print_table
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.config.machines import LinkSettings
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
SELECT = "select_s."
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
FAR = (1, 5, 15, 30)  # H, where the link has distance and nothing else is asked
Elements = Annotated[
    int, Constraint(ge=1, le=LARGEST_FLOAT, description="a whole number, or the name of a published model")
]
OWN: dict[str, Any] = {  # words that no run has
    "compute_s": Seconds, "parameters": Elements | str, "density": PositiveFraction,
    "overlap": NonNegativeFraction, "skew": Annotated[float, Constraint(ge=1, le=NUM_SLICES)],
    "methods": Names, "every": PositiveInt | Counts, SELECT: Seconds,
}  # fmt: skip
DENSITY = 0.001


def advise(words: SettingWords, *, save: str | None = None) -> int:
    """Which method would be the fastest on a cluster, predicted: advise cluster=mine task=vgg16_cifar10

    A step's time is that of computing, selecting and communicating. Computing and selecting are taken from
    stored records of like runs, where there are any; communicating is simulated on the cluster's link by the
    alpha-beta model. What is not known is asked for.

    Args:
        words: settings of a run: cluster=, task=, workers=, link=, inside= and so on. Besides: compute_s=,
            seconds of a step but for selecting and communicating; select_s.METHOD=, seconds that a method
            selects; both may be a range, as 0.1..0.2; parameters=, elements of the model, or the name of a
            published one; density=, k/n; overlap=, what two workers' selections have in common, and skew=;
            methods=, which, with commas (topk-fused: with the fused kernel); every=, H, or several with
            commas: each method averages what H local steps have moved, and is compared with dense in every
            step. Over a link with distance (alpha_s of 1 ms and more) it is 1,5,15,30.
        save: the name of the files that are written.
    """
    config, given = _split(words)
    question, left_out = _question(given, known := Known(config, ResultFolders()))
    model = given.get("parameters")
    model = model if model in MODELS else str(config["task"]["name"])
    table = _table(_step_time_prediction.ranked(question), question, known, model, left_out)
    print_table(table)
    cluster = config["cluster"]
    name = save or f"advise-{cluster['name']}-{cluster['link']['name']}-{model}-{config['workers']}w"
    folder = known.folders.figures
    tables.save_tables([table], folder, name)
    write_atomic(folder / f"{name}.md", f"# {table.title}\n\n{table.to_markdown()}")
    say(str(folder / f"{name}.md"))
    return 0


def _split(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings as a run's config, and the values of the words that are this command's own."""
    given, rest = split_own_words(words, {**OWN, "inside": str})
    inside = given.pop("inside", None)
    try:
        config = compose.resolve(rest).as_dict()
    except ValueError as error:
        own = ", ".join(key for key in OWN if key != SELECT)
        more = f"; advise also takes {own} and {SELECT}METHOD" if "no key" in str(error) else ""
        raise ValueError(f"{error}{more}") from error
    if inside:  # a run has it on virtual ranks only: real nodes have their own
        virtual = compose.resolve({"cluster": "virtual", "inside": inside}).as_dict()
        config["cluster"]["inside"] = virtual["cluster"]["inside"]
    if config["cluster"]["where"] == "slurm" and not any(word.startswith("workers=") for word in rest):
        config["workers"] = config["cluster"]["workers_per_node"]
    return config, given


def _question(given: Mapping[str, Any], known: Known) -> tuple[Question, list[str]]:
    """The question to be answered, and the methods that can't be ranked."""
    network, config = _network(known.config), known.config
    task = config["task"]
    compute_s = _range("compute_s", given) or known.compute_s()
    if compute_s is None:
        place = config["cluster"]["name"] if config["cluster"]["where"] == "slurm" else "local"
        batch = f" task.batch_size={task['batch_size']}" if "batch_size" in task else ""
        raise ValueError(
            f"how long task={task['name']} computes on {known.machine} is not known, for no dense run of it "
            f"with task.batch_size={task.get('batch_size')} and timing.mode=serialised is stored: give "
            "compute_s=SECONDS of a step's forward and backward pass and update, or make one with `python -m "
            f"experiments run cluster={place} task={task['name']}{batch} method=dense workers=2 "
            "timing.mode=serialised train.steps=30 train.validate=never`"
        )
    wanted = given["methods"].split(",") if "methods" in given else []
    for name in wanted:
        _check_method(name)
    select_s = _select_s(given, known, elements := _elements(given, known))
    if lacking := [name for name in wanted if name not in select_s and name != "dense"]:
        raise ValueError(
            f"how long {lacking[0]} takes to select on {known.machine} is not known, for no such run is "
            f"stored: give {SELECT}{lacking[0]}=SECONDS"
        )
    question = Question(
        elements,
        config["workers"],
        given.get("density", DENSITY),
        network,
        compute_s,
        {name: each for name, each in select_s.items() if name in (wanted or select_s)},
        (given["overlap"],) * 3 if "overlap" in given else _step_time_prediction.OVERLAP,
        given.get("skew", _step_time_prediction.SKEW),
        _every(given, network),
    )
    return question, [name for name in LISTED if name not in select_s]


def _check_method(name: str) -> None:
    METHODS.check_name(method := name.partition("-")[0])
    if method not in per_step_names():
        raise ValueError(
            f"methods={name}: local steps are asked for by every=H, which any method here takes; "
            "methods=dense every=30 is the exchange of DiLoCo"
        )
    check_replayable(sparsify.build(method))


def _network(config: Mapping[str, Any]) -> Network:
    cluster, link = config["cluster"], config["cluster"]["link"]
    if None in (link["alpha_s"], link["beta_s_per_byte"]):
        raise ValueError(
            f"cluster={cluster['name']}: link={link['name']} has no alpha and beta, so what communication "
            "takes can't be predicted; choose another link=, as ethernet_10g or nvlink3"
        )
    between, inside = LinkSettings.from_dict(link).to_link("link"), cluster.get("inside")
    fast = LinkSettings.from_dict(inside).to_link("inside") if inside else None
    algorithm = DIRECT_ALGORITHM if between.propagation_s else "textbook"
    return Network(between, fast, int(cluster.get("workers_per_node") or 1), algorithm)


def _every(given: Mapping[str, Any], network: Network) -> tuple[int, ...]:
    """H, each once."""
    asked = given.get("every", FAR if network.inter_node.propagation_s else 1)
    if isinstance(asked, str):
        asked = [int(number) for number in asked.split(",")]
    return tuple(dict.fromkeys([asked] if isinstance(asked, int) else asked))


def _range(name: str, given: Mapping[str, Any]) -> Range | None:
    """A number of seconds, or a range of two, where it was given."""
    value = given.get(name)
    if not isinstance(value, str):
        return None if value is None else Range.around(value, "given")
    low, high = map(float, value.split(".."))
    check_value(name, low, PositiveFloat)
    check_value(name, high, Annotated[float, Constraint(ge=low, le=LARGEST_FLOAT)])
    return Range(low, (low * high) ** 0.5, high, "given")


def _elements(given: Mapping[str, Any], known: Known) -> int:
    if "parameters" in given:
        value = MODELS.get(given["parameters"], given["parameters"])
        if isinstance(value, str):
            raise ValueError(describe_unknown("published model", value, [*MODELS]))
        check_value("parameters", value, Elements)
        return int(value)
    found = known.elements()
    if found is None:
        raise ValueError(
            f"how many parameters task={known.config['task']['name']} has is not known, for no dense run of "
            f"it is stored: give parameters=NUMBER, or one of {', '.join(MODELS)}"
        )
    return found


def _select_s(given: Mapping[str, Any], known: Known, elements: int) -> dict[str, Range]:
    """Seconds by method: as given, else as known, else as a method takes that searches alike."""
    found = known.select_s(elements)
    for key in given:
        if key.startswith(SELECT) and (took := _range(key, given)):
            _check_method(name := key.removeprefix(SELECT))
            found[name] = took
    for name, other in SEARCH_AS.items():
        if name not in found and other in found:
            source = f"as {style.method_style(other).label}'s, which searches alike"
            found[name] = found[other]._replace(source=source)
    return {name: found[name] for name in sorted(found)}


def _table(
    found: Sequence[Prediction], question: Question, known: Known, model: str, left_out: Sequence[str]
) -> tables.Table:
    rows = [
        {
            "method": style.method_style(one.method).label
            + (f", every {one.every} steps" if one.every > 1 else ", every step" * question.is_local),
            "step": one.step.scale_by(1e3),
            "computing": 1e3 * one.compute_s,
            "selecting": 1e3 * one.select_s,
            "communicating": 1e3 * one.transfer_s,
            "speed-up over dense": one.speedup,
            "density": 1.0 if one.method == "dense" else question.density,
            "matters most": one.matters,
        }
        for one in found
    ]
    units = dict.fromkeys(("step", "computing", "selecting", "communicating"), "ms")
    cluster = known.config["cluster"]
    inside = f", inside={cluster['inside']['name']}" if cluster.get("inside") else ""
    title = (
        f"Predicted step times: {model}, {format_number(question.elements)} parameters, "
        f"{question.workers} workers, "
        f"cluster={cluster['name']}, link={cluster['link']['name']}{inside}"
    )
    return tables.Table.from_rows(title, rows, units, _note(question, known, left_out))


def _note(question: Question, known: Known, left_out: Sequence[str]) -> str:
    config = known.config
    sources = {f"computing: {question.compute_s.source}": None}
    for name, each in question.select_s.items():
        sources[f"{style.method_style(name).label}: {each.source}"] = None
    missing = (
        f" Not ranked, for their selection was not measured on {known.machine}: "
        f"{captions.join_words(style.method_style(name).label for name in left_out)} "
        f"({SELECT}METHOD=SECONDS gives it)."
        if left_out
        else ""
    )
    least, _, most = question.overlap
    nodes = math.ceil(question.workers / question.network.workers_per_node)
    flat = (
        f" The link joins all workers alike, also those of one of the {nodes} nodes: inside= says what "
        "these have."
        if config["cluster"]["where"] == "slurm" and nodes > 1 and question.network.intra_node is None
        else ""
    )
    local = (
        " Methods that average every so many steps select and communicate so rarely; what that does to the "
        "model is not predicted, nor what the outer step takes."
    ) * question.is_local
    far = (
        " Everybody sends to everybody at once (collectives=direct), which over this link takes fewer ways "
        "than rings; a way is known within a tenth."
    ) * bool(question.network.inter_node.propagation_s)
    return (
        "Predicted, not measured; nothing overlaps, nobody is late. Where numbers come from: "
        f"{'; '.join(sources)}. Communicating: simulated by the alpha-beta model. Intervals: what the inputs "
        f"may be off by, latency by a factor of {_step_time_prediction.LATENCY:g}, bandwidth of {_step_time_prediction.BANDWIDTH:g}, a "
        f"single measurement or a given number of {_step_time_prediction.GIVEN:g}, the others from the slowest to the "
        f"quickest run; overlap of two workers' selections {least:g} to {most:g}."
        f"{flat}{missing}{local}{far}"
    )
