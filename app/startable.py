"""What a start with these settings would stumble over, beyond what one value tells by itself: where it listens, this
machine's memory, the catalogue. The page asks before it keeps a change; a start meets the same refusals one by one.
"""

from app.errors import AppError
from app.models.machine import card, computer
from app.models.shelf import ModelShelf
from app.server import bind, check_access, explain_bind_error
from app.settings import Settings, SettingsError

_GB = 1e9
_OF_MODELS = ("model", "model_alias")


def check_start(settings: Settings, own_port: int) -> None:
    """Raises SettingsError. own_port: where the server that asks listens itself; the next one takes its place."""
    check_access(settings)
    _check_listening(settings, own_port)
    check_memory(settings)
    _check_models(settings)


def _check_listening(settings: Settings, own_port: int) -> None:
    try:
        bind(settings.host, 0 if settings.port == own_port else settings.port).close()
    except OSError as error:
        raise explain_bind_error(settings, error) from None


def check_memory(settings: Settings) -> None:
    """No KV cache is larger than all of the memory; whether it fits beside the weights is for the load to tell."""
    if settings.kv_gb is None:
        return
    total = (card() or computer()).total / _GB
    if settings.kv_gb > total:
        what = f"`kv_gb` is {settings.kv_gb:g}; this machine has {total:.1f} GB of memory in all. Give less, or none."
        raise SettingsError(what, "kv_gb")


def _check_models(settings: Settings) -> None:
    try:
        ModelShelf(settings.models_folder, aliases=settings.model_alias).resolve(settings.model)
    except AppError as error:
        raise of_settings(error) from None


def of_settings(error: AppError) -> SettingsError:
    """A refusal of the shelf, as one of the setting that led to it."""
    return SettingsError(error.text, error.param if error.param in _OF_MODELS else "")
