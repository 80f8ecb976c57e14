"""A `World` whose servers sleep while training has their devices, and sometimes will not."""

from control_world import RandomWorld
from libra.ids import InstanceId
from libra_supervisor import events
from libra_supervisor.loop import commands


class SleepyWorld(RandomWorld):
    """Sleepers have their process and no device; they answer nothing but that they live."""

    def __init__(self, **options) -> None:
        self.asleep = {}
        """Where the devices are that they gave back."""

        self.sleepless: list[InstanceId] = []
        """Each makes one call to sleep, or to wake up, of that instance fail."""

        super().__init__(**options)

    def kill_process(self, instance_id: InstanceId) -> None:
        if instance_id in self.asleep:
            self._end_process(instance_id, is_asked_for=False)
        else:
            super().kill_process(instance_id)

    def _carry_out(self, command: commands.Command) -> None:
        match command:
            case commands.SleepInstance(instance_id):
                self._sleep(instance_id)
            case commands.WakeInstance(instance_id):
                self._wake(instance_id)
            case commands.ForgetInstance(instance_id) if instance_id in self.asleep:
                assert instance_id not in self.routes, "it fell asleep while it served"
            case commands.RetireInstance(instance_id) if instance_id in self.asleep:
                self.placed[instance_id] = self.asleep.pop(instance_id)
                super()._carry_out(command)
            case commands.SendReload(instance_id):
                assert instance_id not in self.asleep, "weights for one that has no memory"
                super()._carry_out(command)
            case _:
                super()._carry_out(command)

    def _sleep(self, instance_id: InstanceId) -> None:
        assert instance_id not in self.routes, "put to sleep while requests are routed to it"
        process = self.processes.get(instance_id)
        if process is None or self._will_not(instance_id):
            self._carry_out(commands.RetireInstance(instance_id))
            return
        process.version = process.manifest_hash = None
        self.draining.discard(instance_id)
        self.asleep[instance_id] = self.placed.pop(instance_id)
        self.pending.append(events.InstanceAsleep(instance_id, process.incarnation))

    def _wake(self, instance_id: InstanceId) -> None:
        if instance_id not in self.asleep:
            return  # it has ended, and is on its way out
        self.placed[instance_id] = self.asleep.pop(instance_id)
        self._check_slots()
        process = self.processes.get(instance_id)
        if process is None or self._will_not(instance_id):
            self._end_process(instance_id, is_asked_for=True)
            self.start_process(instance_id)
            return
        self.pending.append(events.InstanceWoken(instance_id, process.incarnation))

    def _will_not(self, instance_id: InstanceId) -> bool:
        if instance_id not in self.sleepless:
            return False
        self.sleepless.remove(instance_id)
        return True
