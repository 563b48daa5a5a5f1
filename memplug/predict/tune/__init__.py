"""`memplug tune`: finds the DeepSpeed configuration that fits a GPU and is the fastest by ProTrain's estimators."""
