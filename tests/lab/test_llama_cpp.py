"""`lab/llama_cpp.py`: what it asks of llama.cpp's library and makes of the answers."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest

from piecework.lab.llama_cpp import LlamaCpp

# Logits are 1 for the token that follows in the alphabet of 4, and 0 for the others. Structs are
# smaller than what the caller gives them, as llama.cpp's are.
_LIBRARY = r"""
#include <stdint.h>
#include <string.h>
extern "C" {
struct Model { int64_t others[9]; };
struct Context { uint32_t n_ctx, n_batch; int64_t others[15]; };
struct Quantize {
  int32_t threads, ftype, output, embedding;
  bool requantize, output_too, copy, pure;
};
struct Batch {
  int32_t tokens;
  int32_t* token;
  void *embd, *pos, *n_seq_id, *seq_id;
  int8_t* logits;
};
static float logits[4096];
static uint32_t room;
Model llama_model_default_params() { return {}; }
Context llama_context_default_params() { return {512, 2048, {}}; }
Quantize llama_model_quantize_default_params() { return {0, 1, 7, 7, false, true, false, false}; }
void* llama_model_load_from_file(const char* path, Model) {
  return strcmp(path, "a.gguf") ? nullptr : &room;
}
void* llama_init_from_model(void*, Context params) { room = params.n_ctx; return &room; }
void* llama_get_memory(void*) { return &room; }
void* llama_model_get_vocab(void*) { return &room; }
int32_t llama_vocab_n_tokens(void*) { return 4; }
void llama_memory_clear(void*, bool) { memset(logits, 0, sizeof logits); }
void llama_set_n_threads(void*, int32_t, int32_t) {}
void llama_log_set(void*, void*) {}
void llama_backend_init() {}
void llama_free(void*) {}
void llama_model_free(void*) {}
int32_t llama_decode(void*, Batch batch) {
  if (batch.tokens > static_cast<int>(room)) return 1;
  for (int t = 0; t < batch.tokens; ++t)
    if (batch.logits[t]) logits[4 * t + (batch.token[t] + 1) % 4] = 1;
  return 0;
}
float* llama_get_logits(void*) { return logits; }
float* llama_get_logits_ith(void*, int32_t row) { return logits + 4 * row; }
void* llama_adapter_lora_init(void*, const char*) { return nullptr; }
uint32_t llama_model_quantize(const char*, const char*, const Quantize* how) {
  return !(how->ftype == 15 && how->output == 7 && how->requantize && how->pure && !how->copy);
}
void ggml_backend_load_all_from_path(const char*) {}
}
"""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> LlamaCpp:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "library.cpp").write_text(_LIBRARY)
    for name in ("libggml.so", "libllama.so"):
        command = [compiler, "-shared", "-fPIC", "-o", folder / name, folder / "library.cpp"]
        subprocess.run(command, check=True)
    return LlamaCpp(folder)


def test_each_token_behind_the_first_has_its_log_probability(peer: LlamaCpp) -> None:
    total = math.log(3 + math.e)
    found = peer.logprobs("a.gguf", [[0, 1, 3, 0], [2, 2]])
    assert found == [pytest.approx([1 - total, -total, 1 - total]), pytest.approx([-total])]
    with pytest.raises(ValueError, match=r"cannot load b\.gguf"):
        peer.logprobs("b.gguf", [[0, 1]])


def test_a_file_is_written_in_the_format_that_is_asked_for(peer: LlamaCpp) -> None:
    peer.quantize("a.gguf", "b.gguf", "Q4_K_M", pure=True)
    with pytest.raises(ValueError, match=r"cannot write a\.gguf as Q8_0"):
        peer.quantize("a.gguf", "b.gguf", "Q8_0")


def test_a_folder_without_the_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no libggml"):
        LlamaCpp(tmp_path)
