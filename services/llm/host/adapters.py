"""LoRA adapters of a loaded model, and which of them its context computes with."""

import ctypes
from collections.abc import Mapping
from typing import Any

from services.llm.core.adapters import AdapterSet
from services.llm.host.bindings import api
from services.llm.host.context import Context
from services.llm.host.llama import LlamaError, Model, log


class Adapters:
    """The adapters by name. Raises LlamaError for a file that llama.cpp does not take."""

    def __init__(self, model: Model, context: Context, paths: Mapping[str, str]) -> None:
        self._context = context
        self._loaded: dict[str, Any] = {}
        self._in_use: AdapterSet = ()
        for name, path in paths.items():
            log.lines.clear()
            pointer = api.llama_adapter_lora_init(model.pointer, path.encode())
            if not pointer:
                raise LlamaError(f"llama.cpp cannot load the adapter {name!r}, {path}: {log.complaint()}")
            self._loaded[name] = pointer

    def __bool__(self) -> bool:
        return bool(self._loaded)

    def use(self, wanted: AdapterSet) -> None:
        """Compute with these from the next step on."""
        if wanted == self._in_use:
            return
        pointers = (api.llama_adapter_lora_p_ctypes * len(wanted))(*(self._loaded[name] for name, _ in wanted))
        scales = (ctypes.c_float * len(wanted))(*(scale for _, scale in wanted))
        api.llama_set_adapters_lora(self._context.pointer, pointers, len(wanted), scales)
        self._in_use = wanted
