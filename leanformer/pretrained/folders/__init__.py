"""Folders of weights that other libraries load without leanformer: `config.json`, tokenizer, preprocessing, card.

`huggingface.describe` and `timm.describe` return a `description.Description` of a model in another library;
`files` writes what stands beside the weights, and `card` the model card.
"""
