"""Which requests compute how many tokens in each step.

    Scheduler.schedule()            Scheduler.update_from_output()
      RunningPass                     KVTransferUpdates.apply_failed
      AdmissionPass                   UpdatePass
      StepBuilder -> SchedulerOutput  KVTransferUpdates.apply_finished

Below the passes: ``Holdings`` (what requests hold, and let go of) over ``Requests`` (where they
stand), a KV manager and an ``EncoderPlanner``. No pass knows the scheduler.
"""
