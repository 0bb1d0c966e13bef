"""Links in words, wherever people read of them. Commands, records and files have the names of conf/link."""

from __future__ import annotations

import re

import pandas as pd

from analysis.pictures.numbers import format_number

LINK_COLUMN = "cluster.link.name"
FOUND_GBIT_S_COLUMN = "provenance.machine.link.together_gbit_s"  # what a node found while all were sending
# By the name of the file in conf/link, or of a benchmark's own link.
WORDS_BY_NAME = {
    "ethernet": "10 Gbit/s Ethernet",
    "ethernet_100g": "100 Gbit/s Ethernet",
    "ethernet_100m": "100 Mbit/s Ethernet",
    "ethernet_10g": "10 Gbit/s Ethernet",
    "ethernet_1g": "1 Gbit/s Ethernet",
    "ethernet_200m": "200 Mbit/s Ethernet",
    "ethernet_25g": "25 Gbit/s Ethernet",
    "ethernet_2g": "2 Gbit/s Ethernet",
    "ethernet_500m": "500 Mbit/s Ethernet",
    "infiniband_hdr": "InfiniBand HDR",
    "infiniband_ndr": "InfiniBand NDR",
    "internet_100m_50ms": "100 Mbit/s and 50 ms one way",
    "internet_110_500m_50ms": "110 Mbit/s up, 500 Mbit/s down and 50 ms one way",
    "loopback": "loopback",
    "nvlink": "NVLink",
    "nvlink3": "NVLink 3",
    "nvlink4": "NVLink 4",
    "own": "the cluster's own link",
    "pcie": "PCIe 4.0",
    "pcie3": "PCIe 3.0",
    "pcie4": "PCIe 4.0",
    "pcie5": "PCIe 5.0",
    "wan_1g_20ms": "1 Gbit/s and 20 ms one way",
    "wifi": "100 Mbit/s Wi-Fi",
}


def describe_link(name: str) -> str:
    """Return a link in words: '1 Gbit/s Ethernet'; of a range both ends, of a user's own link its name."""
    return " to ".join(WORDS_BY_NAME.get(part, part) for part in name.split(" to "))


def describe_link_as_found(name: str, runs: pd.DataFrame) -> str:
    """Return a link in words, with what these runs found of an emulated one: '..., 0.86 Gbit/s found'."""
    words = describe_link(name)
    if FOUND_GBIT_S_COLUMN not in runs:
        return words
    found = pd.to_numeric(runs[FOUND_GBIT_S_COLUMN]).dropna()
    return f"{words}, {format_number(found.median(), 2)} Gbit/s found" if len(found) else words


def describe_links_in_text(text: str) -> str:
    """Return a text with words in place of each `link=ethernet_1g`."""
    return re.sub(r"\blink=(\w+)", lambda match: describe_link(match[1]), text)
