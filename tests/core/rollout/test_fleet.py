"""Several engines on one version, with engines that are told when to fail."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from sgld_lora_merge.adapter.families import route
from sgld_lora_merge.errors import LoraMergeError, RequestError
from sgld_lora_merge.rollout.fleet import EngineFleet
from sgld_lora_merge.rollout.live_adapters import LiveAdapters
from sgld_lora_merge.trainer.transport import SyncError
from sgld_lora_merge.wire.schema import STATUS_ROUTE

MODULE, SECOND = "transformer", "transformer_2"
ROUTES = {"high_noise.": MODULE, "low_noise.": SECOND}


def adapter(*layers):
    """A file with these layers."""
    return save({f"{layer}.lora_{side}.weight": torch.ones(1, 1) for layer in layers for side in "AB"})


def routed(layers):
    """Module -> layers, as an engine of two modules routes those of a request that names none."""
    return route({MODULE: [(layer, None) for layer in layers]}, ROUTES)


def modules_of(fields, file):
    """The modules that an engine would put an upload into."""
    if module := fields.get("target_module"):
        return [module]
    return list(routed(load(file))) if b"lora_A" in file else [MODULE]


class Told:
    """An engine as far as versions go. ``fails`` has, by what is asked, the failure that the next such call is."""

    def __init__(self, name, journal=None):
        self.name, self.url = name, f"http://{name}/0"
        self.transport = self.probe = self
        self.live, self.before, self.staged = {}, {}, {}
        self.fails, self.journal, self.starts = {}, [] if journal is None else journal, 0
        self.ill = "it is new"

    def fault(self):
        return self.ill

    def restart(self):
        self._do("restart")
        self.starts += 1
        self.url = f"http://{self.name}/{self.starts}"
        self.live, self.before, self.staged, self.ill = {}, {}, {}, None
        return {"start": 1.0}

    def update(self, fields, file=None):
        self._do("stage" if fields.get("commit") is False else "upload")
        new = dict.fromkeys(modules_of(fields, file), (fields["weight_version"], file))
        if fields.get("commit") is False:
            self.staged = {fields["update_id"]: new}
            return {"success": True, "state": "staged"}
        self.live = {**self.live, **new}
        return {"success": True, "state": "live"}

    def ask(self, route, fields=None):
        what = route.rpartition("/")[2]
        self._do(what)
        match what:
            case "status":
                return {"modules": {MODULE: {"weight_version": None}}
                        | {name: {"weight_version": version} for name, (version, _) in self.live.items()}}  # fmt: skip
            case "resolve":
                return {"success": True, "modules": {MODULE: self.resolve(fields["modules"][MODULE])}}
            case "commit":
                new = self.staged.pop(fields["update_id"])
                self.before, self.live = self.live, {**self.live, **new}
                return {"success": True, "modules": {module: {} for module in new}}
            case "abort":
                self.staged.pop(fields["update_id"])
            case "rollback":
                self.live = self.before
            case "reset":
                self.live = {}
        return {"success": True}

    def resolve(self, layers):
        return {
            layer: {"fault": "unknown layer"} if layer == "nowhere" else {"module": next(iter(routed([layer])))}
            for layer in layers
        }

    def _do(self, what):
        self.journal.append((self.name, what))
        if what in self.fails:
            raise self.fails.pop(what)


class Router:
    def __init__(self, journal):
        self.urls, self.journal = [], journal

    def add(self, url):
        self.urls.append(url)
        self.journal.append(("router", "add"))

    def remove(self, url):
        self.urls.remove(url)
        self.journal.append(("router", "remove"))


def many(count=3, **kwargs):
    engines = [Told(f"e{index}", kwargs.pop("journal", None) if not index else None) for index in range(count)]
    return engines, EngineFleet(engines, LiveAdapters(1000), **kwargs)


def push(together, version, file=b"file", **fields):
    return together.update({"update_id": f"id {version}", "weight_version": version, **fields}, file)


def handed(engines, module, version):
    """What a rank of the trainer does to the engine on its GPU."""
    for engine in engines:
        engine.live = {**engine.live, module: (version, b"by handle")}


def dead(what="gone"):
    return SyncError(what)


def test_an_update_is_staged_everywhere_before_it_is_live_anywhere():
    engines, together = many()
    shared = []
    for engine in engines:
        engine.journal = shared
    push(together, "1")
    steps = [what for _, what in shared if what in ("stage", "commit")]
    assert steps == ["stage"] * 3 + ["commit"] * 3
    assert [engine.live for engine in engines] == [{MODULE: ("1", b"file")}] * 3
    assert together.versions == {MODULE: "1"}


def test_an_engine_that_does_not_take_an_update_is_named_and_the_others_keep_the_old_one():
    engines, together = many()
    push(together, "1")
    engines[1].fails["stage"] = SyncError("NaN in lora_A", answered=400)
    with pytest.raises(SyncError, match=r"^e1 did not take .* all others serve transformer at '1' .*NaN in lora_A"):
        push(together, "2")
    assert [engine.live[MODULE][0] for engine in engines] == ["1"] * 3
    assert [engine.staged for engine in engines] == [{}] * 3
    push(together, "2")
    assert [engine.live[MODULE][0] for engine in engines] == ["2"] * 3
    assert [engine.starts for engine in engines] == [1] * 3  # a refusal is no reason to start it again


@pytest.mark.parametrize("error", [dead(), SyncError("merge failed", answered=500)], ids=["no answer", "500"])
@pytest.mark.parametrize("step", ["stage", "commit"])
def test_an_engine_that_breaks_in_an_update_is_started_again_and_given_the_old_version_first(step, error):
    engines, together = many()
    push(together, "1", b"old")
    engines[2].fails[step] = error
    with pytest.raises(SyncError, match=r"^e2 did not (take|commit)"):
        push(together, "2", b"new")
    assert [engine.live for engine in engines[:2]] == [{MODULE: ("1", b"old")}] * 2
    together.heal()
    assert [engine.live for engine in engines] == [{MODULE: ("1", b"old")}] * 3
    assert [engine.starts for engine in engines] == [1, 1, 2]


def test_an_engine_that_cannot_take_a_commit_back_is_named_too_and_brought_back():
    engines, together = many()
    push(together, "1")
    engines[0].fails["rollback"], engines[1].fails["commit"] = dead(), SyncError("overflow", answered=400)
    with pytest.raises(SyncError, match=r"^e1, e0 did not commit"):
        push(together, "2")
    together.heal()
    assert [engine.live[MODULE][0] for engine in engines] == ["1"] * 3


def test_an_update_brings_a_dead_engine_back_first():
    engines, together = many()
    push(together, "1")
    engines[0].ill = "its process has ended with code -9"
    push(together, "2")
    assert [engine.live[MODULE][0] for engine in engines] == ["2"] * 3
    assert (engines[0].starts, engines[0].journal.count(("e0", "upload"))) == (2, 1)


def test_an_engine_with_other_weights_is_brought_back_without_a_new_start():
    engines, together = many()
    push(together, "1")
    engines[1].live = {}  # it restarted on its own
    engines[2].live = {MODULE: ("somebody else's", b""), "vae": ("1", b"")}
    together.heal()
    assert [engine.live for engine in engines] == [{MODULE: ("1", b"file")}] * 3
    assert [engine.starts for engine in engines] == [1] * 3


def test_an_engine_whose_status_fails_is_started_again():
    engines, together = many()
    push(together, "1")
    engines[1].fails["status"] = SyncError("the ranks differ", answered=503)
    together.heal()
    assert engines[1].starts == 2
    assert engines[1].live == {MODULE: ("1", b"file")}


def test_an_engine_that_does_not_come_back_is_named_and_no_update_goes_out_without_it():
    journal = []
    router = Router(journal)
    engines, together = many(router=router)
    push(together, "1")
    engines[1].ill, engines[1].fails["restart"] = "it hangs", SyncError("not healthy after 60 s")
    with pytest.raises(SyncError, match=r"^not on version transformer at '1': e1: not healthy after 60 s"):
        push(together, "2")
    assert [engine.live[MODULE][0] for engine in engines if engine.ill is None] == ["1"] * 2
    assert sorted(router.urls) == ["http://e0/1", "http://e2/1"]
    push(together, "2")
    assert sorted(router.urls) == ["http://e0/1", "http://e1/2", "http://e2/1"]


def test_every_module_and_adapter_that_is_live_is_given_to_an_engine_that_comes_back():
    engines, together = many(2)
    push(together, "1", b"one")
    push(together, "2", b"two", target_module="transformer_2")
    push(together, "3", b"three")
    engines[0].ill = "gone"
    together.heal()
    assert engines[0].live == engines[1].live == {MODULE: ("3", b"three"), "transformer_2": ("2", b"two")}


def test_after_a_reset_an_engine_that_comes_back_has_base_weights():
    engines, together = many(2)
    push(together, "1")
    together.reset()
    engines[0].ill = "gone"
    together.heal()
    assert [engine.live for engine in engines] == [{}, {}]
    assert together.versions == {}


def test_what_could_not_be_kept_is_refused_before_anything_is_sent():
    engines, together = many(2)
    for fields, file, named in (
        ({"weight_version": ""}, b"", "needs weight_version"),
        ({"update_id": None}, b"", "needs update_id"),
        ({}, b"x" * 1001, "1001 bytes of adapters would be live; at most 1000 are kept"),
    ):
        with pytest.raises(RequestError, match=named):
            together.update({"update_id": "id", "weight_version": "1"} | fields, file)
    push(together, "1", b"x" * 600)
    push(together, "2", b"x" * 600)  # in place of the first
    with pytest.raises(RequestError, match="1200 bytes"):
        push(together, "3", b"x" * 600, adapter="style")
    assert [engine.live[MODULE][0] for engine in engines] == ["2", "2"]


def test_handles_and_routes_that_change_something_are_not_for_several_engines():
    engines, together = many(2)
    together.heal()
    with pytest.raises(SyncError, match="handles go to the engine on their GPU"):
        together.update({"update_id": "id", "weight_version": "1"})
    with pytest.raises(SyncError, match="/lora_merge/reset is not asked of several"):
        together.ask("/lora_merge/reset", {})
    engines[1].fails["verify"] = SyncError("1 of 14 layers are not what they should be", answered=400)
    with pytest.raises(SyncError, match="e1: 1 of 14"):
        together.ask("/lora_merge/verify", {"modules": {}})
    assert together.ask(STATUS_ROUTE)["modules"]


def test_an_update_by_handles_is_live_once_its_file_is_kept():
    engines, together = many()
    push(together, "1", b"old")
    new, file = {"update_id": "by handles", "weight_version": "2"}, adapter("x")

    with together.by_handles() as keep:
        handed(engines[:2], MODULE, "2")
        with pytest.raises(
            SyncError, match=r"^e2 did not take .*at '1' as before. e2: not at version '2': transformer$"
        ):
            keep(new, file)
    together.heal()
    assert [engine.live for engine in engines] == [{MODULE: ("1", b"old")}] * 3

    with together.by_handles() as keep:
        handed(engines, MODULE, "2")
        keep(new, file)
    engines[1].ill = "gone"
    together.heal()
    assert [engine.live[MODULE] for engine in engines] == [("2", b"by handle"), ("2", file), ("2", b"by handle")]


@pytest.mark.parametrize("at_once", [True, False], ids=["both live before one is kept", "one after the other"])
def test_two_syncs_by_handles_of_a_module_each_are_both_kept(at_once):
    """Each counts its versions itself, so that both modules are at the same one."""
    engines, together = many(2)
    uploads = {MODULE: adapter("x"), SECOND: adapter("y")}
    for version in ("1", "2"):
        with together.by_handles() as keep:
            for module in uploads if at_once else ():
                handed(engines, module, version)
            for module, file in uploads.items():
                handed(engines, module, version)
                fields = {"update_id": f"{module} {version}", "weight_version": version, "target_module": module}
                keep(fields, file)
    assert together.versions == {MODULE: "2", SECOND: "2"}
    engines[0].ill = "gone"
    together.heal()
    assert engines[0].live == {module: ("2", file) for module, file in uploads.items()}
    assert engines[0].journal.count(("e0", "upload")) == 2


def test_the_names_in_a_file_without_a_target_module_say_whose_adapter_it_is():
    engines, together = many(2)
    first, second, both = adapter("x"), adapter("low_noise.x"), adapter("base_model.model.high_noise.x", "low_noise.x")
    for modules, file, version in (([MODULE], first, "1"), ([SECOND], second, "1"), ([MODULE, SECOND], both, "2")):
        with together.by_handles() as keep:
            for module in modules:
                handed(engines, module, version)
            keep({"update_id": f"{modules} {version}", "weight_version": version}, file)
        engines[0].ill = "gone"
        together.heal()
        assert {module: engines[0].live[module] for module in modules} == dict.fromkeys(modules, (version, file))
    assert engines[0].live == {MODULE: ("2", both), SECOND: ("2", both)}
    assert engines[0].journal.count(("e0", "upload")) == 1 + 2 + 1  # one file has taken the place of two


@pytest.mark.parametrize(
    ("fields", "file", "told"),
    [
        ({}, adapter("x", "low_noise.x"), "e1: not at version '1': transformer_2"),
        ({"target_module": SECOND}, adapter("x"), "e1: not at version '1': transformer_2"),
        ({"target_module": "vae"}, adapter("x"), "e0: not at version '1': vae"),
        ({}, adapter("x", "nowhere"), "e0: the file's layers have no place: nowhere: unknown layer"),
    ],
)
def test_an_upload_by_handles_that_is_not_live_in_all_its_modules_is_not_kept(fields, file, told):
    engines, together = many(2)
    with together.by_handles() as keep:
        handed(engines, MODULE, "1")
        handed(engines[:1], SECOND, "1")
        with pytest.raises(SyncError, match=told):
            keep({"update_id": "id", "weight_version": "1"} | fields, file)
    together.heal()
    assert [engine.live for engine in engines] == [{}, {}]
    assert [engine.starts for engine in engines] == [1, 1]  # it is no reason to start one again


def test_an_engine_that_does_not_say_where_layers_land_is_named():
    engines, together = many(2)
    with together.by_handles() as keep:
        handed(engines, MODULE, "1")
        engines[1].resolve = lambda layers: {}
        with pytest.raises(SyncError, match=r"^e1 did not take .* e1: the file's layers have no place: x: not said"):
            keep({"update_id": "id", "weight_version": "1"}, adapter("x"))


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (b"file", "the upload is not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "the upload is not a safetensors file"),
        (save({"x.weight": torch.ones(1)}), "'x.weight' is not named <layer>.lora_A"),
        (save({}, {"layer_scaling": "{}"}), "the upload has no layers"),
    ],
)
def test_what_could_not_be_uploaded_again_is_not_kept(file, told):
    _, together = many(1)
    with together.by_handles() as keep, pytest.raises(RequestError, match=told):
        keep({"update_id": "id", "weight_version": "1"}, file)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("immediate", ["stage", "commit"]),
        ("pause", ["stage", "remove", "commit", "add"]),
        ("wait", ["remove", "stage", "commit", "add"]),
    ],
)
def test_the_policy_says_when_the_router_holds_generations_back(policy, order):
    journal = []
    router = Router(journal)
    engines = [Told("e0", journal)]
    together = EngineFleet(engines, LiveAdapters(1000), router, policy)
    together.heal()
    journal.clear()
    push(together, "1")
    assert [what for _, what in journal if what != "status"] == order
    engines[0].fails["stage"] = SyncError("NaN", answered=400)
    with pytest.raises(SyncError):
        push(together, "2")
    assert router.urls == [engines[0].url]


def test_a_policy_that_is_none_or_needs_a_router_says_so():
    with pytest.raises(LoraMergeError, match="'later' is none of immediate, pause, wait"):
        many(policy="later")
    with pytest.raises(LoraMergeError, match="'wait' needs a router"):
        many(policy="wait")
