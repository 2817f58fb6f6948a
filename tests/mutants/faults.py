"""The faults: where, which text becomes which, and the tests that must then fail."""

from __future__ import annotations

from typing import NamedTuple

REFERENCE = "tests/trainer/test_reference.py::"
SETUP = "tests/trainer/test_setup.py::"
TRAINING = "tests/trainer/test_training.py::"
REPORT = "tests/trainer/report/test_run_report.py::"
FOLDER = "tests/trainer/test_run_folder.py::"
LOADER = "tests/trainer/test_loader.py::"
DATASET = "tests/trainer/test_dataset.py::"
CACHE = "tests/trainer/reading/test_cache.py::"


class Mutant(NamedTuple):
    """`old` occurs once in the file; `tests` are pytest's arguments."""

    file: str
    old: str
    new: str
    tests: str


def field(name: str) -> str:
    return f"{REFERENCE}test_a_field_does_what_plain_torch_does[{name}]"


RESUMED = f"{TRAINING}test_resume_at_any_step_is_bit_exact[6]"
TWO_RANKS = f"{REFERENCE}test_two_ranks_do_what_plain_torch_does"

MUTANTS = {
    # the step
    "label-smoothing-off": Mutant(
        "models.py", "label_smoothing=self.label_smoothing", "label_smoothing=0.0", field("data")
    ),
    "clipping-off": Mutant("training.py", "if config.clip_grad:", "if False:", field("clip_grad")),
    "ema-never-updated": Mutant("training.py", "self.ema.update_parameters(self.raw)", "pass", field("ema")),
    "ema-without-buffers": Mutant("training.py", "use_buffers=True", "use_buffers=False", field("ema")),
    "ema-not-evaluated": Mutant("training.py", "self.ema.module if self.ema else self.raw", "self.raw", field("ema")),
    "amp-off": Mutant("training.py", "enabled=self.setup.amp", "enabled=False", field("amp")),
    "loss-not-divided": Mutant("training.py", "(loss.mean() / accumulation)", "loss.mean()", field("data")),
    "gradients-kept": Mutant("training.py", "self.optimizer.zero_grad()", "pass", field("data")),
    "no-sync-off": Mutant(
        "training.py",
        "require_backward_grad_sync = ends_step",
        "require_backward_grad_sync = True",
        f"{REFERENCE}test_gradients_are_exchanged_once_a_step",
    ),
    "norms-in-evaluation-mode": Mutant("training.py", "self.raw.train()", "pass", field("model")),
    "channels-last-off": Mutant(
        "setup.py", ".to(memory_format=torch.channels_last)", "", f"{SETUP}test_model_and_batches_are_channels_last"
    ),
    "batches-not-channels-last": Mutant(
        "augment.py",
        "pixels.contiguous(memory_format=torch.channels_last)",
        "pixels.contiguous()",
        f"{SETUP}test_model_and_batches_are_channels_last",
    ),
    "sync-bn-off": Mutant(
        "setup.py", "nn.SyncBatchNorm.convert_sync_batchnorm(model)", "model", f"{SETUP}test_sync_bn"
    ),
    "few-graphs": Mutant("training.py", "8 + 2 * len(self.loaders)", "8", f"{SETUP}test_each_crop_size_is_compiled"),
    # optimizer and schedule
    "nesterov-off": Mutant("optimizer.py", "nesterov=config.nesterov", "nesterov=False", field("nesterov")),
    "momentum-fixed": Mutant("optimizer.py", "momentum=config.momentum", "momentum=0.9", field("momentum")),
    "betas-fixed": Mutant("optimizer.py", "betas=(config.momentum, 0.999)", "betas=(0.9, 0.999)", field("optimizer")),
    "weight-decay-off": Mutant(
        "optimizer.py", '"weight_decay": weight_decay}', '"weight_decay": 0.0}', field("weight_decay")
    ),
    "biases-decayed": Mutant(
        "optimizer.py", '"weight_decay": 0.0}', '"weight_decay": weight_decay}', field("weight_decay")
    ),
    "rate-not-scaled": Mutant(
        "training.py", "config.lr * self.batching.global_batch / 256", "config.lr", field("data")
    ),
    "warm-up-off": Mutant("schedule.py", "if step < warmup_steps:", "if step < 0:", field("warmup_epochs")),
    "linear-schedule-off": Mutant("schedule.py", "SCHEDULES[schedule]", 'SCHEDULES["cosine"]', field("schedule")),
    "options-of-the-checkpoint": Mutant(
        "optimizer.py",
        "{**saved, **options}",
        "{**options, **saved}",
        f"{SETUP}test_a_resume_takes_the_configs_optimizer_options",
    ),
    # augmentation
    "mixup-off": Mutant("augment.py", "(v2.MixUp, config.mixup)", "(v2.MixUp, 0.0)", field("mixup")),
    "cutmix-off": Mutant("augment.py", "(v2.CutMix, config.cutmix)", "(v2.CutMix, 0.0)", field("cutmix")),
    "mixes-alike-on-ranks": Mutant("augment.py", "[seed, step, rank]", "[seed, step, 0]", f"{TWO_RANKS}[cutmix]"),
    "mixes-alike-in-steps": Mutant("augment.py", "[seed, step, rank]", "[seed, 0, rank]", field("mixup")),
    "flip-not-alternate": Mutant("augment.py", "drawn = ~drawn", "pass", field("alternate_flip")),
    "flip-drawn-anew": Mutant("augment.py", "0 if self.alternate_flip else epoch", "epoch", field("alternate_flip")),
    "flip-the-other-half": Mutant("augment.py", "FLIP) < self.flip", "FLIP) >= self.flip", field("flip")),
    "shift-of-one-side": Mutant(
        "augment.py", "SHIFT_TOP) * (2 * self.pad + 1)", "SHIFT_TOP) * (self.pad + 1)", field("pad")
    ),
    "randaugment-of-one-strength": Mutant("augment.py", "magnitude=randaugment", "magnitude=9", field("randaugment")),
    "randaugment-alike-in-epochs": Mutant(
        "augment.py",
        "uniform(self.seed, epoch, slots, POLICY)",
        "uniform(self.seed, 0, slots, POLICY)",
        field("randaugment"),
    ),
    "erasing-off": Mutant("augment.py", "v2.RandomErasing(erasing,", "v2.RandomErasing(0.0,", field("random_erasing")),
    "mean-not-subtracted": Mutant("augment.py", "(pixels - self._mean)", "pixels", field("data")),
    "imagenet-statistics-off": Mutant(
        "augment.py", 'if config.normalize == "imagenet":', "if False:", field("normalize")
    ),
    "rrc-boxes-turned": Mutant("resample.py", "np.sqrt(area * aspect)", "np.sqrt(area / aspect)", field("augment")),
    "rrc-not-mirrored": Mutant("resample.py", "out - 1 - steps", "steps", field("augment")),
    "rrc-area-fixed": Mutant(
        "augment.py",
        'config.rrc_scale if config.augment == "rrc"',
        '0.08 if config.augment == "rrc"',
        field("rrc_scale"),
    ),
    "cubic-off": Mutant("augment.py", "resample=config.resample", 'resample="triangle"', field("resample")),
    "eval-resize-off": Mutant("augment.py", "eval_resize=config.eval_resize", "eval_resize=None", field("eval_resize")),
    # models and seeds
    "seed-ignored": Mutant("setup.py", "torch.manual_seed(config.seed)", "torch.manual_seed(0)", field("seed")),
    "blurpool-off": Mutant("models.py", "if config.blurpool:", "if False:", field("blurpool")),
    "zero-init-off": Mutant("models.py", "if config.zero_init_residual:", "if False:", field("zero_init_residual")),
    "patches-not-whitened": Mutant(
        "setup.py", "model.whiten(", "print(", f"{SETUP}test_whitened_patches_have_no_correlation"
    ),
    # stages and evaluation
    "stages-late": Mutant("config.py", "stage.epoch <= epoch", "stage.epoch < epoch", field("stages")),
    "eval-size-ignored": Mutant(
        "setup.py", "config.eval_size or last.size", "last.size or config.eval_size", field("eval_size")
    ),
    "eval-every-ignored": Mutant("setup.py", "% self.config.eval_every == 0", "% 1 == 0", field("eval_every")),
    "flip-eval-without-flip": Mutant("evaluation.py", "model(x.flip(3))", "model(x)", field("flip_eval")),
    "flip-eval-always": Mutant(
        "setup.py", "self.config.flip_eval and last", "self.config.flip_eval", field("flip_eval")
    ),
    "top1-counts-top5": Mutant("evaluation.py", "hits[:, 0].sum()", "hits.sum()", field("data")),
    "top5-counts-top1": Mutant("evaluation.py", "topk(min(5,", "topk(min(1,", field("data")),
    "loss-of-a-rank": Mutant(
        "evaluation.py",
        "rows[:, :4].sum(0)",
        "rows[0, :4]",
        "tests/trainer/test_distributed.py::test_evaluation_is_the_same_on_1_to_4_ranks",
    ),
    "buffers-not-shared": Mutant(
        "evaluation.py",
        "    sync_buffers(model, ranks)\n",
        "",
        "tests/trainer/test_distributed.py::test_evaluation_is_the_same_on_1_to_4_ranks",
    ),
    # resume and checkpoints
    "resume-without-optimizer": Mutant("resume.py", "load_optimizer(run.optimizer, saved", "str(saved", RESUMED),
    "resume-without-ema": Mutant("resume.py", "run.ema.load_state_dict(saved", "str(saved", RESUMED),
    "resume-without-weights": Mutant(
        "resume.py", 'load_weights(run.raw, saved["model"]', "load_weights(run.raw, run.raw.state_dict()", RESUMED
    ),
    "resume-without-sums": Mutant("resume.py", "state.sums = sums[run.ranks.rank]", "pass", RESUMED),
    "resume-at-the-epochs-start": Mutant("resume.py", '.load_state_dict(saved["data"])', ".state_dict()", RESUMED),
    "previous-not-kept": Mutant(
        "run_folder.py", "os.replace(last, self.path / PREVIOUS)", "pass", f"{FOLDER}test_newest_valid_checkpoint_wins"
    ),
    "damage-not-noticed": Mutant(
        "run_folder.py", "archive.testzip() is not None", "False", f"{FOLDER}test_newest_valid_checkpoint_wins"
    ),
    "checkpoint-not-a-copy": Mutant(
        "run_folder.py",
        'deepcopy({"format": FORMAT, **state})',
        '{"format": FORMAT, **state}',
        f"{SETUP}test_a_checkpoint_is_a_copy",
    ),
    "diverged-weights-saved": Mutant(
        "training.py", "if not all_finite(self.raw):", "if False:", f"{SETUP}test_diverged_weights_are_never_saved"
    ),
    "checkpoint-steps-ignored": Mutant(
        "training.py", "state.step % config.checkpoint_every == 0", "False", f"{SETUP}test_when_checkpoints_are_written"
    ),
    "checkpoint-minutes-ignored": Mutant(
        "training.py", "return minutes > 0 and", "return False and", f"{SETUP}test_when_checkpoints_are_written"
    ),
    "metrics-not-cut-back": Mutant(
        "metrics.py", '["epoch"] <= epochs_done', '["epoch"] <= 10**9', f"{TRAINING}test_resume_cuts_metrics_back"
    ),
    "links-written-through": Mutant(
        "run_folder.py", "if (path / name).is_symlink():", "if False:", f"{SETUP}test_nothing_is_written_through_links"
    ),
    "foreign-temps-deleted": Mutant(
        "run_folder.py", "stem in OWN_NAMES and", "", f"{SETUP}test_only_own_temp_files_are_deleted"
    ),
    # watching
    "losses-not-watched": Mutant(
        "stop.py",
        "not math.isfinite(total)",
        "False",
        f"{TRAINING}test_a_loss_that_is_not_finite_stops_with_step_and_keys",
    ),
    "usr1-kills": Mutant(
        "stop.py", '"SIGUSR1", ', "", "tests/trainer/test_stop.py::test_signals_are_noted_and_handlers_come_back"
    ),
    "group-torn-down-alone": Mutant(
        "ranks.py",
        "if error.exit_code >= 128:",
        "if True:",
        f"{SETUP}test_a_lone_error_is_said_without_waiting_for_others",
    ),
    # order, Dataset, Loader
    "seed-plus-epoch": Mutant(
        "order.py",
        "bits = np.random.PCG64(np.random.SeedSequence([seed, epoch]))\n    if chunk_images",
        "bits = np.random.PCG64(np.random.SeedSequence([seed + epoch]))\n    if chunk_images",
        "tests/trainer/test_order.py::test_seed_and_epoch_are_not_added",
    ),
    "same-crops-each-epoch": Mutant(
        "dataset.py",
        "crop_offsets(self.seed, epoch, slots, room)",
        "crop_offsets(self.seed, 0, slots, room)",
        f"{DATASET}test_random_crops_are_keyed_by_seed_epoch_and_slot",
    ),
    "same-draws-each-epoch": Mutant(
        "order.py",
        "uniform(seed, epoch, np.arange(len(weights)), STREAM_DRAW)",
        "uniform(seed, 0, np.arange(len(weights)), STREAM_DRAW)",
        f"{DATASET}test_weights_draw_with_replacement_keyed_by_seed_and_epoch",
    ),
    "subset-not-in-fingerprint": Mutant(
        "dataset.py",
        "return digest.hexdigest()",
        "return split.fingerprint",
        f"{DATASET}test_a_subset_serves_its_slots_alone",
    ),
    "all-ranks-the-same": Mutant(
        "loader.py",
        "order[consumed + data.rank :",
        "order[consumed :",
        f"{LOADER}test_evaluation_with_more_ranks_than_samples",
    ),
    "resume-starts-again": Mutant(
        "loader.py",
        "self._consumed, self._resume = samples, True",
        "self._consumed, self._resume = 0, True",
        f"{LOADER}test_a_broken_off_epoch_starts_again_unless_loaded",
    ),
    "epoch-repeated": Mutant(
        "loader.py",
        "loader.data.set_epoch(loader._serving + 1)",
        "loader.data.set_epoch(loader._serving)",
        f"{LOADER}test_epochs_go_on_by_themselves",
    ),
    "batches-overwritten": Mutant(
        "reading/batch_pool.py",
        "        return torch.from_numpy(view)",
        "        self.give_back(memory)\n        return torch.from_numpy(view)",
        f"{LOADER}test_a_batch_in_use_is_never_overwritten",
    ),
    "shared-batches-overwritten": Mutant(
        "reading/collate.py",
        "shared[-1] = 1",
        "shared[-1] = 0",
        f"{DATASET}test_shared_memory_returns_when_its_batch_is_dropped",
    ),
    "changed-samples-served": Mutant(
        "reading/collate.py",
        "all(a is b for a, b in zip(self, self._whole, strict=True))",
        "True",
        f"{DATASET}test_samples_that_were_changed_are_collated_anew",
    ),
    "copy-unchecked": Mutant(
        "reading/copy_crops.py",
        "if row_bytes > row_stride:",
        "if False:",
        "tests/trainer/reading/test_copy_crops.py::test_what_c_cant_check_is_checked",
    ),
    "no-reading-ahead": Mutant(
        "reading/read_ahead.py",
        "begin + batch_size + max(batch_size, AHEAD_BYTES // extent)",
        "begin",
        f"{LOADER}test_cold_crops_are_asked_for_once_and_before_they_are_copied",
    ),
    # the run report
    "stars-across-datasets": Mutant(
        "report/page.py",
        "if data == own and v is not None",
        "if v is not None",
        f"{REPORT}test_runs_on_different_data_are_not_ranked",
    ),
    "rates-one-step-late": Mutant(
        "report/records.py",
        'rate(line["step"] - 1)',
        'rate(line["step"])',
        f"{REPORT}test_learning_rate_shows_every_step_of_the_warm_up",
    ),
    "gaps-where-not-evaluated": Mutant(
        "report/page.py",
        'if key.startswith("val_"):',
        "if False:",
        f"{REPORT}test_epochs_without_evaluation_are_no_gap",
    ),
    # a store that is brought from a URL
    "cache-digest-unchecked": Mutant(
        "reading/cache.py",
        "if digest != split.digests[chunk].tobytes() or data",
        "if data",
        f"{CACHE}test_a_damaged_chunk_ends_the_run[pixels]",
    ),
    "cache-in-the-store's-order": Mutant(
        "reading/cache.py",
        "return chunks[np.argsort(first)]",
        "return chunks",
        f"{CACHE}test_needed_chunks",
    ),
    "cache-lock-ignored": Mutant(
        "reading/cache.py", "yield flock(fd)", "yield True", f"{CACHE}test_two_runs_share_a_cache"
    ),
}
"""Name -> fault."""
