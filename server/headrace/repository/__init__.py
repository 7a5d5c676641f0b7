"""Model repositories: directory layout, `config.pbtxt`, its completion, and file changes.

`layout` lists models and versions, `config` parses a configuration, `completion` fills it in from
the model, `validation` checks it, and `reading` converts it to values for other packages.
`model_files` detects changed files, `overrides` are files from load requests.
"""
