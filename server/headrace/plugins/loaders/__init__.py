"""Loaders of files: scikit-learn, XGBoost, LightGBM, CatBoost, MLflow, PMML, MOJO, PyTorch."""
