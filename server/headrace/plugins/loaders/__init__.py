"""Loaders of model files: scikit-learn, XGBoost, LightGBM, CatBoost, MLflow, PMML, PyTorch."""
