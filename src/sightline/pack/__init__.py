"""Packs samples into micro-batches, one for each forward pass, and estimates their cost."""

from sightline.pack.assign import assign_to_ranks as assign_to_ranks
from sightline.pack.assign import build_empty_micro_batch as build_empty_micro_batch
from sightline.pack.bins import pack as pack
from sightline.pack.cost import CostModel as CostModel
from sightline.pack.cost import MicroBatchWork as MicroBatchWork
from sightline.pack.cost import PackSize as PackSize
from sightline.pack.split import MicroBatchPart as MicroBatchPart
from sightline.pack.split import split_micro_batch as split_micro_batch
from sightline.pack.split import take_sequences as take_sequences
from sightline.pack.truncate import truncate as truncate
