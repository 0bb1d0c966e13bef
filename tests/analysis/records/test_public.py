"""Shipped records say nothing of the machine that they were made on."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import yaml
from pandas.testing import assert_frame_equal

from analysis.records.parquet import read_parquet
from analysis.records.public import anonymize_provenance, strip_private_provenance
from analysis.records.store import Store
from experiments.config.folders import ROOT
from tests.analysis import synthetic

# Whatever is the user's own has `secret` in it here.
OF_A_CLUSTER = """
host: secret-n1.site.org
image: {name: gpu, file: secret.sif, sha256: ab, folder: /home/secret}
topology: GPU0 X secret0
slurm: {SLURM_JOB_ID: "12", SLURM_JOB_PARTITION: secret, SLURM_NTASKS: "2"}
user: secret
data: {name: CIFAR-10, digest: cd, folder: /scratch/secret}
machine:
  checked: [gpu]
  hosts: [secret-n1.site.org, secret-n1]
  workers:
  - {host: secret-n1.site.org, bus: "secret:01", gpu: NVIDIA A100, memory_gib: 39.4, nvlinks: [25.0]}
  - {host: secret-n1, bus: "secret:02", gpu: NVIDIA A100, memory_gib: 39.4, nvlinks: [25.0]}
  nccl: {NCCL_P2P_DISABLE: "1", NCCL_SOCKET_IFNAME: secret0, NCCL_COMM_ID: "10.0.0.1:secret",
         NCCL_HOSTID: secret, NCCL_IB_HCA: secret_0}
  mismatch: ["gpu=a100 was asked for, but secret-n1.site.org, secret-n1 has V100; choose another"]
"""
SHIPPED = """
checked: [gpu]
hosts: [host1, host2]
workers:
- {host: host1, gpu: NVIDIA A100, memory_gib: 39.4, nvlinks: [25.0]}
- {host: host2, gpu: NVIDIA A100, memory_gib: 39.4, nvlinks: [25.0]}
nccl: {NCCL_P2P_DISABLE: "1"}
mismatch: ["gpu=a100 was asked for, but host1, host2 has V100; choose another"]
"""


def test_nothing_of_whose_machine_it_was_is_shipped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config(), **yaml.safe_load(OF_A_CLUSTER))
    frames = synthetic.frames_of(store)
    assert "secret" in frames.runs.to_csv()
    shipped = strip_private_provenance(frames)
    assert "secret" not in "".join(frame.to_csv() for frame in shipped)
    (run,) = shipped.runs.to_dict("records")
    machine = json.loads(run["provenance_json"])["machine"]
    assert machine == yaml.safe_load(SHIPPED)
    assert json.loads(run["provenance.machine.mismatch"]) == machine["mismatch"]
    assert (run["provenance.slurm.SLURM_NTASKS"], run["provenance.data.digest"]) == ("2", "cd")
    assert strip_private_provenance(shipped).runs.equals(shipped.runs)
    # What nobody has listed stays behind.
    told = {"spy": "secret", "image": "secret", "slurm": ["secret"], "cores": 2}
    assert anonymize_provenance(told) == {"image": None, "slurm": [None], "cores": 2}


def test_the_shipped_records_have_nothing_private_and_lose_nothing() -> None:
    frames = read_parquet(ROOT / "results" / "shipped")
    shipped, again = (
        runs.drop(columns="provenance_json").astype(object)
        for runs in (frames.runs, strip_private_provenance(frames).runs)
    )
    assert shipped.drop(columns=[*again]).isna().all(axis=None)
    # A column of which nothing is known is None in one and NaN in the other.
    filled = (runs.map(lambda fact: "" if pd.isna(fact) else fact) for runs in (again, shipped[[*again]]))
    assert_frame_equal(*filled)
