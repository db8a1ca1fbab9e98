"""The types of transformers (``model_type``) about which more is known than their configurations contain.

They were found by loading a small model of each type. A type in no table has not been tried: the loader's survey and
self-check decide.
"""

from collections.abc import Mapping

RECURRENT = "recurrent layers are not served"
SPARSE = "sparse attention is not served"
LATER = "attention to later tokens is not served"
OTHER_ATTENTION = "its attention cannot run over the paged KV cache"
_OTHER_POSITIONS = "positions that it counts in its own way are not served"
TWICE = "layers that attend more than once are not served"

_REASONS: Mapping[str, frozenset[str]] = {
    RECURRENT: frozenset({"rwkv", "xlstm"}),
    OTHER_ATTENTION: frozenset({"doge", "gpt_neo"}),
    _OTHER_POSITIONS: frozenset(
        "camembert data2vec-text kosmos-2.5 roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
    ),
    "the decoder of an encoder-decoder model is not served": frozenset(
        """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
        whisper""".split()
    ),
    TWICE: frozenset({"diffllama", "hrm_text"}),
    "attention that takes 'position_bias' is not served": frozenset({"inkling2_text", "inkling_text"}),
    "layers that attend to images are not served": frozenset({"mllama_text_model"}),
    "it answers no text without an image": frozenset(
        {"blip-2", "git", "instructblip", "instructblipvideo", "kosmos-2"}
    ),
    "a draft model, which reads the KV of another model, is not served alone": frozenset(
        {"gemma4_assistant", "gemma4_unified_assistant"}
    ),
    "text in patches of bytes, in place of tokens, is not served": frozenset({"blt"}),
    "its answers are movements of a robot and no text": frozenset({"pi0"}),
    "it classifies images and answers no text": frozenset({"shieldgemma2"}),
}
REASON_OF_TYPE = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds}
# Types that attend to earlier tokens alone if ``is_decoder`` is set.
ENCODERS = frozenset({"bert", "electra", "ernie", "roc_bert"})
TRIED = ENCODERS | frozenset(
    """afmoe apertus arcee aria aria_text axk1 aya_vision bailing_hybrid bamba beam biogpt bitnet chameleon codegen
    cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text cosmos3_edge cosmos3_omni ctrl cwm
    dbrx deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid dots1 emu3 ernie4_5 ernie4_5_moe
    ernie4_5_vl_moe exaone4 exaone4_5 exaone_moe falcon_h1 falcon_mamba fast_vlm flex_olmo flint fuyu gemma gemma2
    gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm46v glm4_moe
    glm4_moe_lite glm4v glm4v_moe glm_ocr glmga got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss
    gptj granite granite4_vision granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hyperclovax hyperclovax_vision_v2
    idefics2 idefics3 internlm3 internvl iquestcoder jais2 jamba janus jetmoe kimi_k25 kimi_linear kolibri1 laguna
    lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llama4 llama4_text llava llava_next llava_next_video
    llava_onevision longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7
    minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral3 mistral4 mixtral modernbert-decoder
    molmo2 moshi moss_transcribe_diarize muse_glimmer muse_spark nanochat nemotron nemotron_h olmo olmo2 olmo3
    olmo_hybrid olmoe opt ovis2 paddleocr_vl perception_lm persimmon phi phi3 phi4_multimodal phimoe pp_chart2table
    qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_moe qwen2_vl qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe seed_oss smollm3 smolvlm solar_open stablelm
    starcoder2 step3p7 vaultgemma video_llama_3 video_llava vipllava youtu zamba zamba2 zaya""".split()
)
"""Types of which a small model gave transformers' own answers."""
# Types that store the key and value of each chosen expert's head.
EXPERT_HEADS = frozenset({"jetmoe"})
# Types that compute their angles in each step, by the longest context in the batch: none may exceed the original one.
COMPUTES_ANGLES = frozenset({"phimoe"})
