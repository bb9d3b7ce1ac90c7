"""Who may import whom, as ARCHITECTURE.md says it: read from the source of every file, wherever the import stands."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "transformers")

# The half of the engine that knows no tensor, each file below those that may import it.
TORCH_FREE = (
    *(
        "engine.environment",
        "engine.read_ahead",
        "engine.head_start",
        "engine.errors",
        "engine.layout",
        "engine.types",
        "engine.config",
        "engine.messages",
        "engine.plan",
        "engine.blocks",
        "engine.pace",
    ),
    *("engine.model.spec", "engine.model.config_reader", "engine.model.rope_config", "engine.model.architectures"),
    *("engine.quant.stated", "engine.weights.held", "engine.weights.modules", "engine.memory", "engine.forecast"),
    *("engine.checks", "engine.sequence", "engine.compiling", "engine.scheduler"),
    *("engine.engine", "engine.process", "engine.client"),
)
_TORCH_HALF = (
    *(
        "engine.checkpoint",
        "engine.forward",
        "engine.decode_inputs",
        "engine.runner",
        "engine.loading",
        "engine.graphs",
        "engine.landing",
        "engine.replay",
        "engine.probing",
        "engine.sampling",
        "engine.model",
    ),
    *("engine.weights", "engine.quant", "kernels.ops", "kernels.device", "kernels.w4", "kernels.paged_kv"),
    *("kernels.choices", "kernels.virtual_memory", "kernels.w8", "kernels.gpu.planar"),
)
_WORDS = ("engine.types", "engine.errors")
_FORECAST = (
    *("engine.model.architectures", "engine.model.spec", "engine.quant.stated", "engine.memory"),
    *("engine.weights.modules", "engine.forecast"),
)
_BELOW = ("app.errors", "app.settings", "app.background", "app.running", "app.language")

# Room -> what of ours it may import; a room is a module or a package with all that is in it. The closest row counts.
MAY_IMPORT = {
    "launch": ("app.server", "app.settings", "app.cli"),
    "app": (),
    "app.errors": ("engine.errors",),
    "app.settings_table": ("app.setting",),
    "app.settings": ("app.setting", "app.settings_table"),
    "app.chat": ("app.chat", *_BELOW, *_WORDS),
    "app.history": ("app.history", *_BELOW),
    "app.api": ("app.api", "app.chat", "app.models", "app.history", *_BELOW, *_WORDS),
    "app.ui": ("app.ui", "app.chat", "app.models", "app.history", *_BELOW),
    "app.models": ("app.models", "app.chat.types", *_BELOW, *_WORDS, "engine.client", "engine.config", *_FORECAST),
    "app.cli": ("app.cli", "app.chat", "app.llm", "app.models", *_BELOW, *_WORDS, "engine.client", "engine.config"),
    "app.llm": ("app.llm", "app.chat", "app.models", *_BELOW, *_WORDS, "engine.client", "engine.config"),
    "app.server": ("app", "engine.client"),
    "app.page_rooms": ("app",),
    "app.startable": ("app",),
    "app.page_slot": ("app.language",),
    "app.bench_front": ("app.api", "app.chat", *_WORDS),
    **{module: TORCH_FREE[:i] for i, module in enumerate(TORCH_FREE)},
    "engine": (*TORCH_FREE[: TORCH_FREE.index("engine.engine")], *_TORCH_HALF),
    "engine.model_folder": (),
    "engine.bench": ("engine", "kernels.device"),
    "engine.perplexity": ("engine",),
    "kernels": ("kernels",),
}


def _modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    files = [ROOT / "launch.py"]
    for house in ("app", "engine", "kernels"):
        files += sorted((ROOT / house).rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return dict(zip(names, files, strict=True))


MODULES = _modules()


def _imports(module: str) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` gives a.b where that is a module of ours, else a."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module} imports by a relative path"
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                yield longer if longer in MODULES else node.module


def _is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def _allowed(module: str) -> tuple[str, ...]:
    return MAY_IMPORT[max((room for room in MAY_IMPORT if _is_in(module, room)), key=len)]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    ours = [name for name in _imports(module) if name.split(".")[0] in ("launch", "app", "engine", "kernels")]
    assert [name for name in ours if not any(_is_in(name, room) for room in _allowed(module))] == []


@pytest.mark.parametrize("module", [name for name in MODULES if _is_in(name, "app") or name in TORCH_FREE])
def test_the_app_and_the_planning_half_of_the_engine_name_no_torch(module: str) -> None:
    assert [name for name in _imports(module) if name.split(".")[0] in ("torch", "triton")] == []


def test_the_front_door_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse((ROOT / "launch.py").read_text(encoding="utf-8"))
    at_the_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.split(".")[0]
        for node in at_the_top
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert names <= sys.stdlib_module_names


def _run_fresh(code: str) -> str:
    """What a new interpreter, started in the project's root, prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _heavy_after_importing(modules: list[str]) -> str:
    imports = "".join(f"import {module}\n" for module in modules)
    return _run_fresh(f"import sys\n{imports}print([name for name in {HEAVY} if name in sys.modules])")


def test_the_server_loads_no_torch() -> None:
    assert _heavy_after_importing(["app.server"]) == "[]"


def test_the_whole_app_and_the_planning_half_of_the_engine_load_no_torch() -> None:
    app = [name for name in MODULES if _is_in(name, "app")]
    assert _heavy_after_importing([*app, *TORCH_FREE]) == "[]"


def test_our_kernels_package_shows_nothing_to_those_who_look_for_another() -> None:
    """transformers imports PyPI's `kernels` where it finds one, which ours hides; the tests of parity import it so."""
    assert (ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8").strip() == ""
