"""A random two-layer Llama with a byte-level tokenizer and the real chat format: loads in a blink, says nothing.

Needs no prepared base model; vLLM serves it as it is. Deterministic: the same files for the same seed.
"""

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write config, safetensors and tokenizer to `folder` and return it."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(special + letters)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        pad_token=special[2],
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,  # 32 wide: the narrowest head that vLLM attends to on a CPU
            num_key_value_heads=1,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    ).to(torch.bfloat16)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
