"""Two steps with the export on, on however many processes it is launched with."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from launching import accelerator_settings
from tiny import make_trainer

if __name__ == "__main__":
    folder, processes = sys.argv[1], int(sys.argv[2])
    settings = {"selection_export_steps": 1, "max_steps": 2, "per_device_train_batch_size": 8 // processes}
    trainer = make_trainer(folder, method="tip", **accelerator_settings(), **settings)
    assert trainer.accelerator.num_processes == processes
    trainer.train()
