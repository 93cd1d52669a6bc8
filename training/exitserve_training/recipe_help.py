"""The help page of `exitserve train`."""

RECIPE_HELP = """\
a recipe, with the keys most runs need:

  output_dir: runs/my-model       an ordinary Hugging Face checkpoint appears here
  model: path/or/hub-id           fine-tune this causal LM, or, from scratch:
  config: {architecture: llama, num_hidden_layers: 12, hidden_size: 256, ...}
  tokenizer: {train_bpe: {vocab_size: 4096}}      or {path: ...}; default: the model's own
  data:
    files: ["corpus/**/*.txt"]    text, .jsonl, .parquet; or dataset: a datasets id,
    sequence_length: 512          or python_source: [stdlib, site-packages]
    format: chat                  rows of messages, through the model's chat template;
                                  labelled: rows with a class; images: a folder a class
    own_chats: {count: 30000}     of chats: the model writes them itself, with vLLM
  exit_layers: [3, 6, 9]          where the model may stop; or all
  objectives: [aligned]           what to minimise; with options, and several at once:
    - {name: aligned, sample: 2}      of the exit layers, 2 drawn each step
    - {name: simreg, weight: auto}    also: dispersion, nitp, kl_to_last, headless, ...
  exit_aware: {}                  freeze positions at exits, as serving does (fine-tuning)
  lora: {rank: 16}                adapters, merged into the checkpoint at the end
  training: {max_steps: 2000, learning_rate: 1.0e-3, per_device_train_batch_size: 4}
                                  any field of transformers.TrainingArguments

examples:

  exitserve train training/recipes/tiny/aligned.yaml output_dir=runs/tiny
  exitserve train my.yaml model=Qwen/Qwen3-0.6B exit_layers=[7,14,21] bf16=true
  exitserve train my.yaml resume=true             goes on from the newest checkpoint
  exitserve train training/recipes/tiny/chat.yaml     chats, with LoRA, on the bundled model
  exitserve train training/recipes/smollm2-135m.yaml  exits for a chat model, which needs no data
  accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 -m exitserve train my.yaml

while it runs:

  tensorboard --logdir OUTPUT_DIR/logs

all keys: docs/recipes.md; what objectives do: docs/training.md
"""
