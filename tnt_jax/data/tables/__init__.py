"""Tables whose columns have names: Hugging Face datasets, Arrow and Parquet files, tar shards."""
