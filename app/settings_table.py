"""The settings that there are, a row each, in the order of --help."""

import math
import os
import sys
from pathlib import Path

from app.setting import (
    Setting,
    alias,
    choice,
    folder,
    host,
    keys,
    listening,
    many,
    number,
    origin,
    switch,
    text,
    whole,
)


def default_home() -> Path:
    """The platform's folder for a user's data, with the name of this app."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "Fireside"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Fireside"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "fireside"


KV_CACHE_DTYPES = ("auto", "fp32", "fp16", "bf16", "int8")
_LOG_LEVELS = ("debug", "info", "warning", "error")

# What no machine could do, or nobody could mean. What a model or a card can do is for its load to tell.
CONTEXT_TOKENS = (32, 16_777_216)  # a chat template alone takes some tens; the longest published context is 10 million
_SEQUENCES = 1024  # more wait in line: beyond that a step only gets longer
_STEP_TOKENS = (16, 1_048_576)  # one block of the cache; a step of a million tokens takes minutes on any card
_GB = 10_000  # ten of the largest machines' memory
_DAY_S, _YEAR_S = 86_400, 31_536_000
_PER_MINUTE = 1_000_000_000

TABLE: tuple[Setting, ...] = (
    Setting(
        name="model",
        default="smollm2-135m-instruct",
        read=text,
        allowed="a catalogue id, a Hugging Face repository (owner/name) or a folder",
        help="model to load: a catalogue id, a Hugging Face repository (owner/name) or a folder",
    ),
    Setting(
        name="host",
        default="127.0.0.1",
        read=listening,
        allowed="a host name or an address of this machine",
        help="address to listen on; 0.0.0.0 lets other machines in",
    ),
    Setting(
        name="port",
        default=8000,
        read=whole(0, 65535),
        allowed="a whole number from 0 to 65535 (0 takes a free port)",
        help="port of the page and of the endpoint; 0 takes a free one",
    ),
    Setting(
        name="home",
        default=None,
        read=folder,
        allowed="a folder",
        help="folder of models and settings.yaml",
        default_text=str(default_home()),
    ),
    Setting(
        name="browser",
        default=True,
        read=switch,
        allowed="true or false",
        help="do not open the page in a browser",
        default_text="the browser is opened",
        takes="nothing",
    ),
    Setting(
        name="max_model_len",
        applies="load",
        default=None,
        read=whole(*CONTEXT_TOKENS),
        allowed=f"a whole number of tokens from {CONTEXT_TOKENS[0]:,} to {CONTEXT_TOKENS[1]:,}",
        help="tokens that a conversation may hold, prompt and answer together",
        default_text="the model's context, or what fits in memory",
    ),
    Setting(
        name="max_num_seqs",
        applies="load",
        default=32,
        read=whole(1, _SEQUENCES),
        allowed=f"a whole number from 1 to {_SEQUENCES:,}",
        help="requests computed at once; more wait in line",
    ),
    Setting(
        name="max_num_batched_tokens",
        applies="load",
        default=None,
        read=whole(*_STEP_TOKENS),
        allowed=f"a whole number of tokens from {_STEP_TOKENS[0]:,} to {_STEP_TOKENS[1]:,}",
        help="tokens computed in one step at most",
        default_text="512 on a CPU, 2048 on a GPU, 8192 on one of 40 GB",
    ),
    Setting(
        name="gpu_memory_utilization",
        applies="load",
        default=0.90,
        read=number(0.0, 1.0),
        allowed="a number above 0 and at most 1",
        help="share of the GPU's memory that may be used",
    ),
    Setting(
        name="gpu_memory_gb",
        applies="load",
        default=None,
        read=number(0.0, _GB),
        allowed=f"a number of GB above 0 and at most {_GB:,}",
        help="act as a GPU with so many GB (24 for a 3090 or 4090)",
        default_text="all that the card has",
    ),
    Setting(
        name="kv_cache_dtype",
        applies="load",
        default="auto",
        read=choice(*KV_CACHE_DTYPES),
        choices=KV_CACHE_DTYPES,
        allowed="one of " + ", ".join(KV_CACHE_DTYPES),
        help=f"type of the KV cache: {', '.join(KV_CACHE_DTYPES)}",
    ),
    Setting(
        name="keep_packed",
        applies="load",
        default=True,
        read=switch,
        allowed="true or false",
        help="do not keep 4-bit weights beside a model as the card holds them: saves disk, each load takes longer",
        default_text="kept",
        takes="nothing",
    ),
    Setting(
        name="quantize_lm_head",
        applies="load",
        default="auto",
        read=choice("auto", "on", "off"),
        choices=("auto", "on", "off"),
        allowed="one of auto, on, off",
        help="hold the output layer in 8 bits; auto does so with 4-bit models on a GPU",
    ),
    Setting(
        name="kv_gb",
        applies="load",
        default=None,
        read=number(0.0, _GB),
        allowed=f"a number of GB above 0 and at most {_GB:,}",
        help="size of the KV cache, in GB",
        default_text="what is left; on a CPU a quarter of free memory, at most 4",
    ),
    Setting(
        name="api_key",
        default=(),
        read=keys,
        allowed="KEY or NAME:KEY, the key 8 to 512 printable characters without blank, comma and colon",
        help="a key that requests must bring, KEY or NAME:KEY; may be given several times",
        default_text="no key is asked",
        takes="list",
        is_secret=True,
    ),
    Setting(
        name="admin_key",
        default=(),
        read=keys,
        allowed="KEY or NAME:KEY, the key 8 to 512 printable characters without blank, comma and colon",
        help="a key that may also load and unload models; may be given several times",
        default_text="where there are keys, nobody may",
        takes="list",
        is_secret=True,
    ),
    Setting(
        name="key_file",
        default=None,
        read=folder,
        allowed="a file",
        help="file of hashed keys, as `python -m app.api.keys` writes it",
        default_text="`api-keys` in the home folder, where it is there",
    ),
    Setting(
        name="allow_no_key",
        default=False,
        read=switch,
        allowed="true or false",
        help="serve other machines without any key",
        default_text="refused",
        takes="nothing",
    ),
    Setting(
        name="allowed_host",
        default=(),
        read=many(host),
        allowed="a host name or an address without http:// and port, or *",
        help="another name under which the server may be asked; may be given several times",
        default_text="this machine's names and every IP address",
        takes="list",
    ),
    Setting(
        name="allowed_origin",
        default=(),
        read=many(origin),
        allowed="an origin such as https://chat.example.org, or *",
        help="web pages elsewhere that may call, such as https://chat.example.org; may be given several times",
        default_text="pages of this machine",
        takes="list",
    ),
    Setting(
        name="requests_per_minute",
        default=None,
        read=whole(1, _PER_MINUTE),
        allowed=f"a whole number from 1 to {_PER_MINUTE:,}",
        help="requests that each key may send in a minute",
        default_text="no limit",
    ),
    Setting(
        name="tokens_per_minute",
        default=None,
        read=whole(1, _PER_MINUTE),
        allowed=f"a whole number of tokens from 1 to {_PER_MINUTE:,}",
        help="tokens, prompt and answer, that each key may use in a minute",
        default_text="no limit",
    ),
    Setting(
        name="ssl_certfile",
        default=None,
        read=folder,
        allowed="a file",
        help="certificate (PEM) for HTTPS",
        default_text="plain HTTP",
    ),
    Setting(
        name="ssl_keyfile",
        default=None,
        read=folder,
        allowed="a file",
        help="private key (PEM) of that certificate",
        default_text="in the certificate's file",
    ),
    Setting(
        name="ssl_self_signed",
        default=False,
        read=switch,
        allowed="true or false",
        help="HTTPS with a certificate that Fireside makes and keeps in the home folder",
        default_text="plain HTTP",
        takes="nothing",
    ),
    Setting(
        name="model_alias",
        default=(),
        read=many(alias),
        allowed="NAME=MODEL",
        help="another name for a model in requests, NAME=MODEL; may be given several times",
        default_text="those of models.yaml",
        takes="list",
    ),
    Setting(
        name="model_fallback",
        applies="now",
        default=False,
        read=switch,
        allowed="true or false",
        help="answer requests for an unknown model with the one in hand",
        default_text="refused with a 404",
        takes="nothing",
    ),
    Setting(
        name="load_on_request",
        applies="now",
        default=True,
        read=switch,
        allowed="true or false",
        help="refuse requests for a model that is not loaded",
        default_text="a request loads the model that it names, if it is on this machine",
        takes="nothing",
    ),
    Setting(
        name="max_models",
        applies="now",
        default=3,
        read=whole(1, 100),
        allowed="a whole number from 1 to 100",
        help="models in memory at once, where they fit; the one that was used longest ago makes room",
    ),
    Setting(
        name="idle_timeout",
        applies="now",
        default=None,
        read=number(0.0, _YEAR_S),
        allowed=f"a number of seconds above 0 and at most {_YEAR_S:,} (a year)",
        help="seconds after which a model that nobody uses gives its memory back; the next request loads it again",
        default_text="it stays",
    ),
    Setting(
        name="drain_timeout",
        applies="now",
        default=30.0,
        read=number(math.nextafter(0.0, -1.0), _DAY_S),
        allowed=f"a number of seconds from 0 to {_DAY_S:,} (a day)",
        help="seconds that answers may go on when another model needs their model's place",
    ),
    Setting(
        name="step_timeout",
        applies="now",
        default=None,
        read=number(math.nextafter(1.0, 0.0), _DAY_S),
        allowed=f"a number of seconds from 1 to {_DAY_S:,} (a day)",
        help="seconds without the end of a step after which an engine counts as hung and is started anew",
        default_text="600 on a CPU, 120 on a GPU",
    ),
    Setting(
        name="load_timeout",
        applies="load",
        default=600.0,
        read=number(math.nextafter(1.0, 0.0), _DAY_S),
        allowed=f"a number of seconds from 1 to {_DAY_S:,} (a day)",
        help="seconds without a word of an engine that loads after which it counts as hung and is started anew",
    ),
    Setting(
        name="log_level",
        default="info",
        read=choice(*_LOG_LEVELS),
        choices=_LOG_LEVELS,
        allowed="one of " + ", ".join(_LOG_LEVELS),
        help=f"how much is logged: {', '.join(_LOG_LEVELS)}",
    ),
)
