"""Text and state-space models of transformers: encoders, decoders, encoder-decoders."""

from __future__ import annotations

from .building import transformers

_ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLACES = {"max_position_embeddings": 64}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False, **_PLACES}
# A decoder without grouped heads.
_PLAIN = {**_ENCODER, "use_cache": False, **_PLACES}
_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False, **_SPECIAL}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "use_cache": False}
# torch's exporter can't decompose fused attention with a bias for a dynamic batch ("Cannot view a tensor").
_T5_EAGER = {**_T5, "decoder_start_token_id": 0, "attn_implementation": "eager"}
_BART = {
    **{"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "use_cache": False,
        "decoder_start_token_id": 2,
    },
    **_SPECIAL,
}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 0,
    "max_position_embeddings": 32,
}
_DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, **_PLACES}
_MOBILE = {"intermediate_size": 32, "intra_bottleneck_size": 16, "embedding_size": 16, "num_feedforward_networks": 2}
_XLNET = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
_MODERN = {**_SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
_RWKV = {
    "vocab_size": 64,
    "hidden_size": 32,
    "attention_hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
_MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "use_cache": False}
_WINDOW = {"sliding_window": 8}

_FIXED = ("input_ids:int64[batch,12]{0:64}",)
_IDS = ("input_ids:int64[batch,sequence]{0:64}",)
_MASKED = (*_IDS, "attention_mask:int64[batch,sequence]{1:2}")
_PAIR = (*_FIXED, "decoder_input_ids:int64[batch,5]{0:64}")

ENCODERS = (
    transformers(
        "BERT", "BertModel", (*_FIXED, "attention_mask:int64[batch,12]{1:2}"), **_ENCODER, max_position_embeddings=32
    ),
    transformers("DeBERTa v1", "DebertaModel", _FIXED, **_ENCODER, **_DEBERTA),
    transformers("DeBERTa v2", "DebertaV2Model", _MASKED, **_ENCODER, **_DEBERTA),
    transformers("RoBERTa", "RobertaModel", _MASKED, **_ENCODER, **_PLACES),
    transformers("DistilBERT", "DistilBertModel", _MASKED, **_DISTIL),
    transformers("ALBERT", "AlbertModel", _MASKED, **_ENCODER, embedding_size=16, **_PLACES),
    transformers("ELECTRA", "ElectraModel", _MASKED, **_ENCODER, embedding_size=16, **_PLACES),
    transformers("MPNet", "MPNetModel", _IDS, **_ENCODER, **_PLACES),
    transformers("ModernBERT", "ModernBertForMaskedLM", _MASKED, **_ENCODER, **_MODERN),
    transformers("MobileBERT", "MobileBertModel", _FIXED, **{**_ENCODER, **_MOBILE}, **_PLACES),
    transformers("SqueezeBERT", "SqueezeBertModel", _IDS, **_ENCODER, embedding_size=32, **_PLACES),
    transformers(
        "ConvBERT", "ConvBertModel", _IDS, **_ENCODER, embedding_size=32, head_ratio=2, conv_kernel_size=3, **_PLACES
    ),
    transformers("RoFormer", "RoFormerModel", _IDS, **_ENCODER, embedding_size=32, **_PLACES),
    transformers(
        "ESM",
        "EsmModel",
        _IDS,
        **_ENCODER,
        **_PLACES,
        position_embedding_type="rotary",
        pad_token_id=1,
        mask_token_id=32,
    ),
    transformers("LayoutLM", "LayoutLMModel", _IDS, **_ENCODER, **_PLACES, max_2d_position_embeddings=32),
    transformers("Megatron-BERT", "MegatronBertModel", _MASKED, **_ENCODER, **_PLACES),
    transformers("XLNet", "XLNetModel", _FIXED, **_XLNET),
    transformers(
        "Nyströmformer", "NystromformerModel", _FIXED, **_ENCODER, **_PLACES, num_landmarks=4, segment_means_seq_len=12
    ),
    transformers("EuroBERT", "EuroBertModel", _IDS, **{**_DECODER, **_SPECIAL}),
)
DECODERS = (
    transformers("Llama", "LlamaModel", _FIXED, **_DECODER),
    transformers("Gemma 2", "Gemma2Model", _FIXED, **_DECODER),
    transformers("Gemma 3", "Gemma3TextModel", _IDS, **_DECODER, **_WINDOW),
    transformers("Cohere", "CohereModel", _FIXED, **_DECODER, **_SPECIAL, use_qk_norm=True),
    transformers("Cohere 2", "Cohere2Model", _IDS, **_DECODER, **_SPECIAL, **_WINDOW),
    transformers("Mistral", "MistralForCausalLM", _MASKED, **_DECODER, **_WINDOW),
    transformers("Qwen 2", "Qwen2Model", _IDS, **_DECODER),
    transformers("Qwen 3", "Qwen3ForCausalLM", _MASKED, **_DECODER),
    transformers("OLMo 2", "Olmo2Model", _IDS, **_DECODER, **_SPECIAL),
    transformers("Granite", "GraniteModel", _IDS, **_DECODER),
    transformers("Nemotron", "NemotronModel", _IDS, **_DECODER),
    transformers("GLM 4", "Glm4Model", _IDS, **_DECODER, **_SPECIAL),
    transformers("SmolLM 3", "SmolLM3Model", _IDS, **_DECODER, **_SPECIAL),
    transformers("Phi", "PhiModel", _IDS, **_PLAIN),
    transformers("Phi 3", "Phi3Model", _IDS, **_DECODER, **_SPECIAL),
    transformers("StableLM", "StableLmModel", _IDS, **_PLAIN, num_key_value_heads=2, qk_layernorm=True),
    transformers("StarCoder 2", "Starcoder2Model", _IDS, **_PLAIN, num_key_value_heads=2, norm_type="layer_norm"),
    transformers("Persimmon", "PersimmonModel", _IDS, **_PLAIN),
    transformers("GPT-2", "GPT2LMHeadModel", _MASKED, **_GPT),
    transformers("GPT-NeoX", "GPTNeoXModel", _IDS, **_PLAIN),
    transformers("GPT-J", "GPTJModel", _IDS, **_GPT, rotary_dim=4),
    transformers(
        "GPT-Neo", "GPTNeoModel", _IDS, **_PLAIN, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    transformers("OPT", "OPTModel", _IDS, **_PLAIN, ffn_dim=48, word_embed_proj_dim=32),
    transformers("BLOOM", "BloomModel", _IDS, vocab_size=64, hidden_size=32, n_layer=2, n_head=4, use_cache=False),
    transformers("Falcon", "FalconModel", _IDS, **_PLAIN, new_decoder_architecture=True, num_kv_heads=2),
    transformers(
        "MPT", "MptModel", _IDS, vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, use_cache=False
    ),
    transformers("Mixtral", "MixtralModel", _IDS, **_DECODER, num_local_experts=4, num_experts_per_tok=2),
    transformers("Mamba", "MambaModel", ("input_ids:int64[batch,6]{0:64}",), **_MAMBA, state_size=8),
    transformers(
        "Mamba 2",
        "Mamba2Model",
        _FIXED,
        **_MAMBA,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        expand=2,
        chunk_size=4,
    ),
    transformers("Falcon Mamba", "FalconMambaModel", ("input_ids:int64[batch,6]{0:64}",), **_MAMBA, state_size=8),
    transformers("RWKV", "RwkvModel", ("input_ids:int64[batch,6]{0:64}",), **_RWKV, context_length=16, use_cache=False),
)
ENCODER_DECODERS = (
    transformers("T5", "T5ForConditionalGeneration", _PAIR, **_T5_EAGER),
    transformers("UMT5", "UMT5Model", _PAIR, **_T5_EAGER),
    transformers("BART", "BartForConditionalGeneration", _PAIR, **_BART, **_PLACES),
    transformers("Marian", "MarianModel", _PAIR, **_BART, **_PLACES),
    transformers("Pegasus", "PegasusModel", _PAIR, **_BART, **_PLACES),
    transformers("M2M-100", "M2M100Model", _PAIR, **_BART, **_PLACES),
)

TEXT = (*ENCODERS, *DECODERS, *ENCODER_DECODERS)
