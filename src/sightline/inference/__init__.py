"""PROCESS: the inference server. References in, tokens out.

    client --HTTP--> server (event loop) --EngineRequest--> engine (its own thread or loop)
                        validator: checks                    pixels, prefill, decode, sample
           <--JSON--    errors: types          <--done--

`server`, `chat_endpoint`, `validator`, `errors` and `engine` implement the generate protocol and do
not import torch. `torch_engine` is the embedded engine, and `vllm_plugin` runs inside vLLM.
Requests are stateless: caches only make them faster.
"""
