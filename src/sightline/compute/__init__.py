"""Computation that trainer and engines share: models, attention, logprobs, weight transports.

model                                    a checkpoint loaded with our attention inside
attention, _cuda, _cudnn, _shapes        attention patterns and kernels
fused_layers, triton_kernels             fused layers and Triton kernels for GPUs
logprobs                                 logprobs under the distribution that was sampled from
feature_cache                            a cache of image features
tensor_file, checkpoint_files            safetensors written and read tensor by tensor
weights, lora_weights                    published versions: files, manifests, adapters
weight_transport, built_in_transports    how versions travel from trainer to servers
broadcast, tcp_store                     versions sent without files
shared_weights, weights_digest           versions in shared memory, and the digest of weights
"""
