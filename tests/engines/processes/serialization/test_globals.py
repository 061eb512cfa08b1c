"""Globals that functions of the script read are sent to workers, and again when they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.errors import CannotCross

from ..connections import LocalChannel, script

SCRIPT = """
import argparse, threading
import numpy as np
import torch
import torch.nn.functional

TEMP = 1
SETTINGS = {"scale": [1, 2]}
args = argparse.Namespace(depth=1)
mask, table = np.zeros(5000), torch.zeros(3)
guard = threading.Lock()

EMPTY = argparse.Namespace()

class Scale:
    by = 1
    steps = [1]

def with_offset():
    offset = 1
    def read():
        return offset
    def write(value):
        nonlocal offset
        offset = value
    return read, write

read_offset, set_offset = with_offset()

def with_method():
    shift = 1
    class Shifted:
        @property
        def shift(self):
            return shift
        @staticmethod
        def twice():
            return 2 * shift
    def write(value):
        nonlocal shift
        shift = value
    return Shifted, write

Shifted, set_shift = with_method()

def helper():
    return ("old", TEMP)

def forward():
    classes = Scale.by, Scale.steps, Shifted().shift, Shifted().twice(), getattr(EMPTY, "depth", 0), read_offset()
    return TEMP, SETTINGS["scale"][0], args.depth, mask[0].item(), table[0].item(), helper(), classes

def later():
    return LATER

def guarded():
    with guard:
        return 1
"""

CHANGES = {
    "rebound": "TEMP = 5",
    "changed in place": "SETTINGS['scale'][0] = 7",
    "attribute of an object": "args.depth = 3",
    "array": "mask[0] = 2",
    "tensor": "table.add_(1)",
    "tensor, past its version": "table.data.add_(1)",
    "function redefined": "def helper(): return ('new', TEMP, SETTINGS)",
    "function that needs more": "extra = [1]\ndef helper(): return extra, np.float64(2)",
    "class redefined": "class Scale: by, steps = 2, []",
    "attribute of a class": "Scale.by = 3",
    "list in a class": "Scale.steps.append(3)",
    "attribute of an empty object": "EMPTY.depth = 3",
    "variable of a closure": "set_offset(3)",
    "variable of a method": "set_shift(3)",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_globals_are_sent(change: str) -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    there = channel.to_worker(at_home.forward)
    assert there() == at_home.forward()
    assert not channel.send_changed_globals()
    exec(change, at_home.__dict__)
    assert channel.send_changed_globals()
    assert there() == at_home.forward()
    assert not channel.send_changed_globals()


def test_an_equal_number_is_no_change() -> None:
    at_home, channel = script("TEMP = 1234567\ndef forward(): return TEMP"), LocalChannel()
    channel.to_worker(at_home.forward)
    at_home.TEMP = int("1234567")
    assert not channel.send_changed_globals()
    at_home.TEMP = 1234567.0
    assert channel.send_changed_globals()


def test_added_and_deleted_globals_are_sent() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    later = channel.to_worker(at_home.later)
    with pytest.raises(NameError):
        later()
    at_home.LATER = [1]
    channel.send_changed_globals()
    assert later() == [1]
    del at_home.LATER
    channel.send_changed_globals()
    with pytest.raises(NameError):
        later()


def test_added_and_deleted_class_attributes_are_sent() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    scale = channel.to_worker(at_home.Scale)
    exec("Scale.new = lambda self: TEMP + 1", at_home.__dict__)
    del at_home.Scale.by
    assert channel.send_changed_globals()
    assert scale().new() == 2
    assert not hasattr(scale, "by")
    assert not channel.send_changed_globals()


def test_functions_of_a_script_share_one_namespace() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    first, second = channel.to_worker(at_home.forward), channel.to_worker(at_home.helper)
    assert first.__globals__ is second.__globals__
    assert first.__globals__["helper"] is second
    assert channel.to_parent(second) is at_home.helper


def test_a_large_global_is_sent_once() -> None:
    at_home, channel = (
        script("table = list(range(1000))\nread = lambda i: table[i]\nother = lambda i: table[i]"),
        LocalChannel(),
    )
    assert channel.to_worker(at_home.read)(3) == 3
    assert channel.pickle_size > 2000
    assert channel.to_worker(at_home.other)(3) == 3
    assert channel.pickle_size < 1000


def test_an_unsendable_global_raises_only_where_it_is_used() -> None:
    at_home, channel = script(SCRIPT), LocalChannel()
    guarded, helper = channel.to_worker([at_home.guarded, at_home.helper])
    assert helper() == ("old", 1)
    with pytest.raises(CannotCross, match=r"global 'guard', which guarded reads \(a _thread.lock\)"):
        guarded()
    at_home.guard = torch.no_grad()
    channel.send_changed_globals()
    assert guarded() == 1
    at_home.guard = script(SCRIPT).guard
    channel.send_changed_globals()
    with pytest.raises(CannotCross, match="global 'guard'"):
        guarded()


KEPT = """
import threading
class Keeps:
    def __init__(self): self.lock = threading.Lock()
    def __call__(self): return 1
thing = %s
def use(): return thing()
def other(): return 1
"""


@pytest.mark.parametrize(
    ("thing", "advice"),
    [("threading.Lock()", r"create it inside the function that uses it\.$"), ("Keeps()", "`__getstate__`")],
)
def test_errors_for_globals_give_fitting_advice(thing: str, advice: str) -> None:
    at_home, channel = script(KEPT % thing), LocalChannel()
    use = channel.to_worker(at_home.use)
    with pytest.raises(CannotCross, match=advice):
        use()
    at_home.thing = at_home.other
    channel.send_changed_globals()
    assert use() == 1
    at_home.thing = script(KEPT % thing).thing
    channel.send_changed_globals()
    with pytest.raises(CannotCross, match=advice):
        use()


def test_globals_written_in_a_worker_are_reported() -> None:
    at_home, channel = (
        script("""
COUNT, CACHE, OTHER = 0, [], {}
def forward(x):
    global COUNT
    COUNT += x
    CACHE.extend([x] * x)
    return OTHER
"""),
        LocalChannel(),
    )
    there = channel.to_worker(at_home.forward)
    there(0)
    assert channel.worker.modified_globals() == []
    there(1)
    assert channel.worker.modified_globals() == ["CACHE", "COUNT"]
    channel.parent.mark_all_unsent()
    channel.send_changed_globals()
    assert channel.worker.modified_globals() == []
    assert there.__globals__["CACHE"] == []
    at_home.COUNT = 5
    assert channel.send_changed_globals(), "they are still looked after"


def test_the_cache_of_a_logger_is_no_change() -> None:
    at_home, channel = (
        script("""
import logging
logger = logging.getLogger("instep.tests")
def forward():
    logger.info("a batch")
    return logger.name
"""),
        LocalChannel(),
    )
    there = channel.to_worker(at_home.forward)
    at_home.logger._cache.clear()
    assert there() == "instep.tests"
    assert channel.worker.modified_globals() == []
    assert not channel.send_changed_globals()


def test_functions_of_an_imported_module_use_its_globals() -> None:
    channel = LocalChannel()
    function = torch.no_grad()(lambda: torch.is_grad_enabled())
    there = channel.to_worker(function)
    assert there() is False
    assert there.__globals__ is function.__globals__


def test_a_module_that_cannot_be_imported() -> None:
    helpers: Any = script("VALUE = 1\ndef read(): return VALUE")
    helpers.__name__ = "helpers"
    at_home, channel = script("def forward(): return helpers.read(), helpers.VALUE"), LocalChannel()
    at_home.helpers = helpers
    there = channel.to_worker(at_home.forward)
    assert there() == (1, 1)
    helpers.VALUE = 2
    channel.send_changed_globals()
    assert there() == (2, 2)
    assert channel.to_parent(there.__globals__["helpers"]) is helpers
