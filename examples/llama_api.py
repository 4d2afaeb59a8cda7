"""The part of llama.cpp's C API for llama_cpp_decode.py, by ctypes, in the shared object of the PyPI package xllamacpp.

Structures and the bytes of a state are those of llama.cpp b11549; a library with other structures is refused.
"""

import ctypes
import importlib.util
from pathlib import Path

import numpy

WORDS = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")
WORDS += ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling", "pooling", "attention", "flash")
# The defaults of `llama_context_default_params`: with other structures they would be at other places.
DEFAULTS = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "flash": -1, "type_k": 1, "type_v": 1}
F32 = 0
# A state has words, cells, words, and for each layer K and then V. The first words: two of the library's own, the numbers of
# streams and of cells. The later words: whether V is transposed, the number of layers, and two zeros.
WORD = numpy.dtype("<u4")
CELL = numpy.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
# The rows of a layer: K is [tokens, heads, dim] and V is [heads, dim, tokens].
K_ROWS = numpy.dtype([("type", "<i4"), ("row_bytes", "<u8")])
V_ROWS = numpy.dtype([("type", "<i4"), ("item_bytes", "<u4"), ("rows", "<u4")])


class ContextParams(ctypes.Structure):
    """`llama_context_params`, passed by value; behind the set fields there is more room than the library uses."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in WORDS),
        ("numbers", ctypes.c_int32 * 8),
        ("callback", ctypes.c_void_p * 2),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("more", ctypes.c_byte * 128),
    )


class ModelParams(ctypes.Structure):
    """`llama_model_params` as the library makes them, with room to spare."""

    _fields_ = (("all", ctypes.c_byte * 256),)


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("more", ctypes.c_void_p * 5))


def _library():
    """The shared object, with the types of the called functions."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None:
        raise RuntimeError("xllamacpp is not installed: pip install xllamacpp==2026.10.11549")
    library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("xllamacpp*.so"))))
    pointer, i32, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
    types = {
        "llama_log_set": (None, [LOG, pointer]),
        "llama_model_default_params": (ModelParams, []),
        "llama_context_default_params": (ContextParams, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, ModelParams]),
        "llama_init_from_model": (pointer, [pointer, ContextParams]),
        "llama_model_n_head_kv": (i32, [pointer]),
        "llama_model_n_layer": (i32, [pointer]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (i32, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_batch_get_one": (Batch, [ctypes.POINTER(i32), i32]),
        "llama_decode": (i32, [pointer, Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, i32]),
        "llama_state_seq_get_size": (size, [pointer, i32]),
        "llama_state_seq_get_data": (size, [pointer, pointer, size, i32]),
        "llama_state_seq_set_data": (size, [pointer, pointer, size, i32]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_quiet = LOG(lambda level, text, data: None)


class Llama:
    """A model and one sequence with float32 KV; flash attention is off, since it rounds to float16."""

    def __init__(self, gguf, threads=1):
        self._library = library = _library()
        library.llama_log_set(_quiet, None)
        library.llama_backend_init()
        params = library.llama_context_default_params()
        if any(getattr(params, name) != value for name, value in DEFAULTS.items()):
            raise RuntimeError("this llama.cpp has other structures: pip install xllamacpp==2026.10.11549")
        model = library.llama_model_load_from_file(str(gguf).encode(), library.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {gguf}: convert the model again")
        # No context length given is the model's own.
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 0, 1 << 20, threads, threads
        params.flash, params.type_k, params.type_v = 0, F32, F32
        self._context = library.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {gguf}: free some memory")
        self._layers, self._heads = library.llama_model_n_layer(model), library.llama_model_n_head_kv(model)
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def feed(self, tokens):
        """Computes these tokens behind those before; the logits of the last one."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        # The batch points into the array.
        if status := self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError(f"llama_decode answers {status} for {len(tokens)} tokens: give it shorter prompts")
        return numpy.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, -1), (self._vocabulary,)).copy()

    def begin(self, k=None, v=None):
        """Forgets all tokens, and takes K and V, [layers, heads, tokens, dim], as those of the first ones, if there are any."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        if k is None or not k.shape[2]:
            return
        heads, count, dim = k.shape[1:]
        cells = numpy.zeros(count, CELL)
        cells["position"], cells["sequences"] = numpy.arange(count), 1
        parts = [self._state()[:8], numpy.array([1, count], WORD), cells, self._words()]
        for layer in k:
            parts += [numpy.array((F32, heads * dim * 4), K_ROWS), layer.transpose(1, 0, 2).astype("<f4")]
        for layer in v:
            parts += [numpy.array((F32, 4, heads * dim), V_ROWS), layer.transpose(0, 2, 1).astype("<f4")]
        state = b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)
        if self._library.llama_state_seq_set_data(self._context, state, len(state), 0) != len(state):
            raise RuntimeError("llama.cpp refuses the KV: the GGUF is of another model than the namespace")

    def kv(self):
        """K and V of all tokens, [layers, heads, tokens, dim]."""
        state = self._state()
        count = int(numpy.frombuffer(state, WORD, 4)[3])
        at = 16 + count * CELL.itemsize
        if not numpy.array_equal(numpy.frombuffer(state, WORD, 4, at), self._words()):
            raise RuntimeError("this llama.cpp has other states: pip install xllamacpp==2026.10.11549")
        # The dimensions of all heads, in each row of K.
        width = int(numpy.frombuffer(state, K_ROWS, 1, at + 16)["row_bytes"][0]) // 4
        layers = numpy.frombuffer(state, numpy.dtype([("rows", "V12"), ("content", "<f4", count * width)]), offset=at + 16)
        k = layers["content"][: self._layers].reshape(self._layers, count, self._heads, -1)
        v = layers["content"][self._layers :].reshape(self._layers, self._heads, -1, count)
        return k.transpose(0, 2, 1, 3), v.transpose(0, 1, 3, 2)

    def _words(self):
        return numpy.array([1, self._layers, 0, 0], WORD)

    def _state(self):
        state = ctypes.create_string_buffer(self._library.llama_state_seq_get_size(self._context, 0))
        self._library.llama_state_seq_get_data(self._context, state, len(state), 0)
        return state.raw
