"""Supervised training and evaluation of any module, with any DataLoader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy})
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

Batches are pairs of inputs and targets; the module maps inputs to outputs, the criterion maps
outputs and targets to their mean loss. Batch sizes are totals over all ranks, every sample counts
once, and all ranks call together. A criterion that weights samples differently (class weights,
ignore_index) divides by the weights of one rank's share of a batch, so its loss and gradient depend
on the number of ranks and on the batch size.
"""
