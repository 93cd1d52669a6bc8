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
  objective: aligned              every exit layer is trained; or ce, the last layer alone
  exit_layers: [3, 6, 9]          or all
  training: {max_steps: 2000, learning_rate: 1.0e-3, per_device_train_batch_size: 4}
                                  any field of transformers.TrainingArguments

examples:

  exitserve train training/recipes/python-tiny.yaml output_dir=runs/tiny
  exitserve train my.yaml model=Qwen/Qwen3-0.6B exit_layers=[7,14,21] bf16=true
  exitserve train my.yaml resume=true             goes on from the newest checkpoint

while it runs:  tensorboard --logdir OUTPUT_DIR/logs
all keys:       docs/training.md
"""
