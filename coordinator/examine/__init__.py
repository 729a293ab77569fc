"""`brigade doctor` and `brigade smoke`: facts are collected here and there, findings follow from them."""
