"""The name "autopar" is known without an import, and nobody's `import torch` pays for it. Each case is a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_autopar
from lightning_autopar import _autoload
from tests.processes import lean_path
from tests.work import counted

PACKAGE = Path(lightning_autopar.__file__).parent


def python(
    code: str, *options: str, path: Path | None = None, arguments: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; ``path`` is searched for packages before the installed ones."""
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **environment, **({"PYTHONPATH": str(path)} if path else {})},
        cwd=path or sys.prefix,  # `python -c` searches the directory it runs in first
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def told(code: str, *options: str, path: Path | None = None, **environment: str) -> object:
    """What ``code`` prints as its last line of JSON; it must have ended well."""
    result = python(code, *options, path=path, **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


#: Lightning's imports without those that nothing here needs.
LEAN = {"PYTHONPATH": lean_path()}
KNOWN = "'autopar' in importlib.import_module('lightning.pytorch.strategies').StrategyRegistry"

HOST = """
    class Registry(dict):
        def register(self, name, strategy, description):
            if name in self:
                raise ValueError(name)
            self[name] = strategy.__closure__[0].cell_contents  # for which root it makes a strategy
    StrategyRegistry = Registry()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """Stand-ins for both Lightnings, quick to import, beside the real package."""
    for host in ("lightning/pytorch", "pytorch_lightning"):
        directory = tmp_path / host / "strategies"
        directory.mkdir(parents=True)
        (directory / "__init__.py").write_text(textwrap.dedent(HOST))
        for parent in directory.relative_to(tmp_path).parents:
            (tmp_path / parent / "__init__.py").touch()
    (tmp_path / "lightning_autopar").symlink_to(PACKAGE)
    return tmp_path


#: What a user's program sees, one thing after the other: importing both takes seconds, which one process does for all of them.
SEEN = """
    import json, os, sys
    import lightning.pytorch
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import StrategyRegistry
    seen = {"known": "autopar" in StrategyRegistry}
    seen["imported"] = sorted(name for name in sys.modules if name.startswith("lightning_autopar"))
    seen["named"] = type(Trainer(strategy="autopar", logger=False).strategy).__module__
    os.environ["PL_TRAINER_STRATEGY"] = "autopar"
    seen["by the environment"] = type(Trainer(logger=False).strategy).__name__
    del os.environ["PL_TRAINER_STRATEGY"]
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel
    seen["by files"] = []
    for config in sys.argv[1:]:
        cli = LightningCLI(BoringModel, args=["--config", config], run=False, save_config_callback=None)
        seen["by files"].append(type(cli.trainer.strategy).__name__)
    print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What :data:`SEEN` says, where two CPU devices are given."""
    folder = tmp_path_factory.mktemp("configs")
    named, with_options = folder / "named.yaml", folder / "options.yaml"
    named.write_text("trainer:\n  strategy: autopar\n  logger: false\n")
    with_options.write_text(
        "trainer:\n  logger: false\n  strategy:\n    class_path: lightning_autopar.AutoParallelStrategy\n"
        "    init_args:\n      allow: [single, fsdp]\n      devices: 2xcpu:1GiB\n"
    )
    result = python(SEEN, arguments=(str(named), str(with_options)), **LEAN, AUTOPAR_DEVICES="cpu:1GiB")
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


class TestRealLightning:
    def test_the_name_is_known_without_an_import(self, seen: dict[str, object]) -> None:
        assert seen["known"] is True

    def test_our_code_is_not_imported_until_the_name_is_used(self, seen: dict[str, object]) -> None:
        assert seen["imported"] == ["lightning_autopar", "lightning_autopar._autoload"]

    def test_a_trainer_takes_the_name(self, seen: dict[str, object]) -> None:
        assert seen["named"] == "lightning_autopar.strategies.auto"

    def test_the_environment_names_it(self, seen: dict[str, object]) -> None:
        assert seen["by the environment"] == "AutoParallelStrategy"

    def test_lightning_cli_takes_the_name_and_the_class_path(self, seen: dict[str, object]) -> None:
        assert seen["by files"] == ["AutoParallelStrategy", "AutoParallelStrategy"]


class TestTorch:
    """The hook as torch calls it, against stand-ins for Lightning."""

    @pytest.mark.parametrize(("switch", "known"), [("1", True), ("0", False)])
    def test_off_switch(self, hosts: Path, switch: str, known: bool) -> None:
        code = f"import importlib, json, torch; print(json.dumps({KNOWN}))"
        assert told(code, path=hosts, LIGHTNING_AUTOPAR_AUTOLOAD=switch) is known

    def test_an_import_makes_it_known_where_torch_loads_no_backends(self, hosts: Path) -> None:
        code = f"""
            import importlib, json, torch
            known = [{KNOWN}]
            import lightning_autopar
            print(json.dumps([*known, {KNOWN}]))
        """
        assert told(code, path=hosts, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [False, True]


class TestHook:
    """Against stand-ins, without torch: the rules of the hook itself."""

    REGISTERED = """
        import importlib, json
        {first}
        names = ("lightning.pytorch.strategies", "pytorch_lightning.strategies")
        registries = [importlib.import_module(name).StrategyRegistry for name in names]
        {then}
        print(json.dumps(registries))
    """
    EXPECTED = ({"autopar": "lightning.pytorch"}, {"autopar": "pytorch_lightning"})

    def registered(self, hosts: Path, first: str = "", then: str = "", *options: str, **environment: str) -> object:
        code = textwrap.dedent(self.REGISTERED).format(first=first, then=then)
        return told(code, "-S", *options, path=hosts, **environment)

    def test_registers_when_lightning_is_imported_later(self, hosts: Path) -> None:
        assert self.registered(hosts, first="import lightning_autopar") == list(self.EXPECTED)

    def test_registers_when_lightning_was_imported_before(self, hosts: Path) -> None:
        assert self.registered(hosts, then="import lightning_autopar") == list(self.EXPECTED)

    def test_nothing_registers_by_itself(self, hosts: Path) -> None:
        assert self.registered(hosts) == [{}, {}]

    @pytest.mark.parametrize("where", ["first", "then"])
    def test_off_switch(self, hosts: Path, where: str) -> None:
        code = {where: "import lightning_autopar._autoload as a; a.install()"}
        assert self.registered(hosts, **code, LIGHTNING_AUTOPAR_AUTOLOAD="0") == [{}, {}]

    def test_twice_is_once(self, hosts: Path) -> None:
        again = (
            "import sys; from lightning_autopar._autoload import install; "
            "before = list(sys.meta_path); install(); assert sys.meta_path == before"
        )
        assert self.registered(hosts, first=again, then="install()") == list(self.EXPECTED)

    def test_a_second_copy_of_the_module_adds_no_second_finder(self, hosts: Path) -> None:
        fresh = (
            "import sys, lightning_autopar; before = list(sys.meta_path); del sys.modules['lightning_autopar'], "
            "sys.modules['lightning_autopar._autoload']; import lightning_autopar; assert sys.meta_path == before"
        )
        assert self.registered(hosts, first=fresh) == list(self.EXPECTED)

    def test_a_taken_name_is_left_alone(self, hosts: Path) -> None:
        taken = "registries[0]['autopar'] = 'theirs'; import lightning_autopar"
        assert self.registered(hosts, then=taken) == [{"autopar": "theirs"}, self.EXPECTED[1]]

    def test_a_reloaded_lightning_knows_it_again(self, hosts: Path) -> None:
        again = "import sys; registries[0] = importlib.reload(sys.modules['lightning.pytorch.strategies']).StrategyRegistry"
        assert self.registered(hosts, first="import lightning_autopar", then=again) == list(self.EXPECTED)

    def test_the_module_keeps_its_own_loader(self, hosts: Path) -> None:
        code = """
            import json, lightning_autopar, lightning.pytorch.strategies as s
            loaders = [s.__loader__, s.__spec__.loader]
            print(json.dumps([type(loader).__name__ for loader in loaders] + [loaders[0].get_source(s.__name__) != ""]))
        """
        assert told(code, "-S", path=hosts) == ["SourceFileLoader", "SourceFileLoader", True]

    def test_another_hook_that_asks_every_finder_does_not_loop(self, hosts: Path) -> None:
        another = """if True:
            import sys
            class Another:
                busy = False
                def find_spec(self, name, path=None, target=None):
                    if not name.endswith(".strategies") or self.busy:
                        return None
                    self.busy = True
                    try:
                        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
                        return next((spec for spec in found if spec), None)
                    finally:
                        self.busy = False
            import lightning_autopar
            sys.meta_path.insert(0, Another())
        """
        assert self.registered(hosts, first=textwrap.dedent(another).replace("\n", "\n        ")) == list(self.EXPECTED)

    def test_an_import_that_fails_fails_as_it_would_without_us(self, hosts: Path) -> None:
        (hosts / "lightning/pytorch/strategies/__init__.py").write_text("raise RuntimeError('theirs')")
        result = python("import lightning_autopar, lightning.pytorch.strategies", "-S", path=hosts)
        assert "RuntimeError: theirs" in result.stderr
        shutil.rmtree(hosts / "lightning/pytorch/strategies")
        result = python("import lightning_autopar, lightning.pytorch.strategies", "-S", path=hosts)
        assert "ModuleNotFoundError: No module named 'lightning.pytorch.strategies'" in result.stderr

    @pytest.mark.parametrize("options", [(), ("-W", "error")])
    def test_a_registry_that_raises_is_a_logged_warning(self, hosts: Path, options: tuple[str, ...]) -> None:
        broken = (hosts / "lightning/pytorch/strategies/__init__.py").read_text().replace("if name in self", "if True")
        (hosts / "lightning/pytorch/strategies/__init__.py").write_text(broken)
        result = python("import lightning_autopar, lightning.pytorch.strategies", "-S", *options, path=hosts)
        assert result.returncode == 0
        assert "'autopar' couldn't be registered with lightning.pytorch.strategies" in result.stderr

    def test_install_never_raises(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(sys, "meta_path", None)
        _autoload.install()
        assert "can't be found by name" in caplog.text


class TestCost:
    def test_standard_library_only(self, hosts: Path) -> None:
        code = """
            import sys, json
            import lightning_autopar
            loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
            print(json.dumps(sorted(name for name in loaded if not name.startswith("_"))))
        """
        assert told(code, "-S", path=hosts) == ["lightning_autopar"]

    def test_a_broken_package_leaves_torch_alone(self, tmp_path: Path) -> None:
        copy = tmp_path / "lightning_autopar"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file in copy.rglob("*.py"):
            if file.relative_to(copy).as_posix() not in ("__init__.py", "_autoload.py"):
                file.write_text("raise RuntimeError('broken')")
        code = """
            import json
            import torch, lightning_autopar
            from lightning.pytorch.strategies import StrategyRegistry
            try:
                StrategyRegistry.get("autopar")
            except RuntimeError as error:
                print(json.dumps([lightning_autopar.__file__, str(error)]))
        """
        path = os.pathsep.join([str(tmp_path), *LEAN["PYTHONPATH"].split(os.pathsep)])
        assert told(code, PYTHONPATH=path) == [str(copy / "__init__.py"), "broken"]

    def test_the_hook_costs_two_small_modules_and_a_few_calls(self, hosts: Path) -> None:
        """A millisecond, as installed."""
        code = """
            import json, os, sys
            before, calls = set(sys.modules), [0]
            def count(frame, event, what):
                calls[0] += event in ("call", "c_call")
            sys.setprofile(count)
            from lightning_autopar._autoload import install
            install()
            sys.setprofile(None)
            print(json.dumps([sorted({*sys.modules} - before), calls[0]]))
        """
        modules, calls = told(code, "-S", path=hosts)
        assert modules == ["__future__", "lightning_autopar", "lightning_autopar._autoload"]
        assert calls < 1500

    def test_every_other_import_costs_a_call(self) -> None:
        assert counted(_autoload._Finder().find_spec, "numpy")[1] <= 2, "its own, and the end of counting"
