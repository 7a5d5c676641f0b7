"""Loaders of libraries' model files: scikit-learn, XGBoost, LightGBM, CatBoost, MLflow, PyTorch."""
