"""PROCESS: the inference server. References in, tokens out.

    client --HTTP--> server (event loop) --EngineRequest--> engine (a thread or loop of its own)
                        validator: checks                    pixels, prefill, decode, sample
           <--JSON--    errors: types          <--done--

`server`, `chat_endpoint`, `validator`, `errors` and `engine` speak the generate protocol and know
no torch. `torch_engine` computes; `vllm_plugin` has vLLM compute. A request is complete in itself;
every cache only makes it faster.
"""
