"""Train and evaluate any module on labelled data, with any DataLoader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy})
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

A batch is a pair of inputs and targets. The module maps inputs to outputs, and the criterion maps
outputs and targets to their mean loss or to one loss per sample (reduction="none"). Batch sizes are
totals over all ranks, every sample counts once, and every rank must make the same calls. If steps
are divided among ranks or by grad_accumulation, a criterion that returns a sum, or a mean with
unequal weights (ignore_index, class weights), is refused: its mean over parts of a batch is not its
value for the batch. With one loss per sample, it trains the same on any number of ranks.
"""
