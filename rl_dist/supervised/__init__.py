"""Train and evaluate any module on labelled data, with any DataLoader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy})
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

A batch is a pair of inputs and targets. The module maps inputs to outputs, and the criterion maps
outputs and targets to their mean loss. Batch sizes are totals over all ranks, every sample counts
once, and every rank must make the same calls. A criterion with unequal sample weights (class
weights, ignore_index) divides the loss by the sum of the weights in one rank's share of a batch.
The loss and the gradient therefore depend on the number of ranks and on the batch size.
"""
