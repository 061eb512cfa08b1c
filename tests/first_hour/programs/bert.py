"""Fine-tuning BERT: the batch is a dictionary with padded tokens, a mask, labels, and the texts themselves."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

TEXTS = [
    "a great film",
    "dull and far too long",
    "I loved it",
    "not good",
    "what a great cast , what a great story",
    "dull",
    "too long by half",
    "loved the story , loved the cast",
    "a good film",
]
WORDS = ["<pad>", *sorted({word for text in TEXTS for word in text.split()})]


def collate(texts):
    rows = [[WORDS.index(word) for word in text.split()] for text in texts]
    longest = max(map(len, rows))
    return {
        "text": texts,
        "input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([int("great" in text or "loved" in text or text == "a good film") for text in texts]),
    }


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, batch):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        output = self.bert(**inputs)
        return {"loss": output.loss, "logits": output.logits, "text": batch["text"]}


def run(wrap):
    torch.manual_seed(0)
    model = wrap(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    history = []
    for _ in range(2):
        for batch in DataLoader(TEXTS, batch_size=4, collate_fn=collate):
            optimizer.zero_grad()
            output = model(batch)
            output["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            assert output["text"] == batch["text"]
            history += [output["loss"].item(), output["logits"].square().sum().item()]
    return history
