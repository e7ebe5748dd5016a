"""PROCESS: the inference server. References in, tokens out.

    client --HTTP--> server (event loop) --Request--> engine (a thread of its own)
                        door: checks                     row, pixels, prefill, decode, sample
           <--JSON--    errors: types        <--done--

`server`, `door`, `errors` and `settings` speak the generate protocol and know no torch.
`torch_engine` computes. A request is complete in itself; every cache only makes it faster.
"""
