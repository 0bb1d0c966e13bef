"""Links are told in words."""

from __future__ import annotations

import pandas as pd

from analysis.pictures import links
from tests.conftest import ROOT


def test_each_link_has_words_and_a_users_own_its_name() -> None:
    names = {path.stem for path in (ROOT / "conf" / "link").glob("*.yaml")}
    assert names - {"loopback"} <= {name for name in names if links.describe_link(name) != name}
    assert links.describe_link("ethernet_100m to ethernet_2g") == "100 Mbit/s Ethernet to 2 Gbit/s Ethernet"
    assert links.describe_link("mine") == "mine"


def test_what_was_found_of_an_emulated_link_is_told_beside_what_was_asked() -> None:
    runs = pd.DataFrame({links.FOUND_GBIT_S_COLUMN: [0.861, None, 0.859]})
    assert links.describe_link_as_found("ethernet_1g", runs) == "1 Gbit/s Ethernet, 0.86 Gbit/s found"
    for unprobed in (runs[1:2], pd.DataFrame()):
        assert links.describe_link_as_found("ethernet_1g", unprobed) == "1 Gbit/s Ethernet"


def test_a_sentence_that_names_a_setting_has_words_instead() -> None:
    text = links.describe_links_in_text("link=ethernet_10g was asked for, 10 Gbit/s")
    assert text == "10 Gbit/s Ethernet was asked for, 10 Gbit/s"
