"""Files of libraries as models: scikit-learn, XGBoost, LightGBM, CatBoost, MLflow, PyTorch."""
