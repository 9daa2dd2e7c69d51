"""Train and evaluate any module on labelled data, with any DataLoader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy})
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

A batch is a pair of inputs and targets. The module maps inputs to outputs. The criterion maps
outputs and targets to their mean loss, or to one loss per sample (reduction="none"). A batch size
is a total over all ranks, no two ranks use the same sample in an epoch, and every rank must make
the same calls.

If a batch is divided among ranks, or a step into several batches (grad_accumulation), a criterion
must not return a sum or a mean with unequal weights (ignore_index, class weights). Such a criterion
is refused, because its mean over the parts differs from its value for the whole. If the criterion
returns one loss per sample instead, the training is the same on any number of ranks.
"""
