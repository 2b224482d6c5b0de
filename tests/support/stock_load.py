"""Load a model with the stock loader, all layers on a ggml-rpc server, and generate: stock_load.py MODEL HOST:PORT
TOKENS.

Runs under the Python of the stock peer, in which llama_cpp can be imported. Prints one JSON object: the generated
tokens and their text.
"""

import ctypes
import json
import os
import sys

import llama_cpp

PROMPT = b"The capital of France is"


def main() -> None:
    """Load, generate greedily, print."""
    model, endpoint, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # llama_cpp has loaded both already; the bare name finds those instead of loading copies with a registry of their
    # own.
    rpc, ggml = ctypes.CDLL("libggml-rpc.so.0"), ctypes.CDLL("libggml.so.0")
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
    if not registry:
        sys.exit(f"the stock client cannot reach {endpoint}")
    ggml.ggml_backend_register(registry)
    llm = llama_cpp.Llama(model_path=model, n_gpu_layers=99, n_ctx=128, n_threads=2, seed=1, verbose=True)
    tokens: list[int] = []
    for token in llm.generate(llm.tokenize(PROMPT), temp=0.0, top_k=1):
        tokens.append(int(token))
        if len(tokens) == count:
            break
    print(json.dumps({"tokens": tokens, "text": llm.detokenize(tokens).decode(errors="replace")}), flush=True)
    # Upstream's own clean-up at exit is not what is tested here.
    os._exit(0)


if __name__ == "__main__":
    main()
