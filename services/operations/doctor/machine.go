package doctor

import (
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/machine"
)

const (
	// nearlyFull and full are shares of a file system in percent. At 10 the kubelet
	// begins to evict pods by default (nodefs.available<10%).
	nearlyFull = 10
	full       = 2
	// lowMemory is the share of memory, in percent, and lowMemoryBytes the amount below
	// which the kubelet evicts pods by default is 100 MiB: both must be gone below.
	lowMemory      = 5
	lowMemoryBytes = 256 << 20
)

var machineConditions = []condition{
	{
		id: "look-unanswered", severity: warning,
		sees: "gbctl doctor, and other commands that look at files, take long or print nothing.",
		why:  "A part of the node didn't answer in time. For files, the cause is mostly a disk that hangs or fails.",
		next: "Look for errors of disks and network devices in gbctl dmesg. The other findings may be incomplete.",
		holds: func(s *snapshot) []finding {
			if len(s.silent) == 0 {
				return nil
			}
			return one(finding{what: "Not everything could be examined within " + collectBudget.String() + ".", evidence: s.silent})
		},
	},
	{
		id: "maintenance", severity: failure,
		sees:   "The console shows that there is no usable configuration; only the commands that maintenance mode allows are answered.",
		why:    "No source of the configuration has a usable one.",
		next:   "Apply one: gbctl -n ADDRESS apply-config --insecure -f FILE.",
		causes: []cause{{codes: []reason.Code{machine.ConfigurationUnusable}, why: "A configuration was found, but it can't be used. The evidence shows where it is wrong, or why it can't be read."}},
		holds: func(s *snapshot) []finding {
			if s.stage != machine.Maintenance || s.config != nil {
				return nil
			}
			f := finding{what: "The node has no configuration and is in maintenance mode."}
			if svc, ok := s.services[machine.ID]; ok {
				f.since, f.evidence = s.at(svc.Since), []string{svc.asStatus()}
				f.code = svc.Reason
			}
			return one(f)
		},
	},
	{
		id: "secrets-missing", severity: failure,
		sees: "gbctl get controllerfailures shows missing cluster.aggregatorCA secret (or another one).",
		why:  "The configuration lacks a secret that a control plane needs: it was made for an older release, or by hand.",
		next: "Make a configuration with gbctl gen config from the cluster's secrets, and apply it.",
		holds: func(s *snapshot) (out []finding) {
			for _, c := range s.controllers {
				if c.Spec.Reason == secrets.Missing {
					out = append(out, finding{what: "The configuration is incomplete: " + c.Spec.Error + ".", since: c.Spec.Since, evidence: []string{asFailure(c)}})
				}
			}
			return out
		},
	},
	{
		id: "disks-not-ready", severity: failure,
		sees:    "Service disks isn't up; containerd, etcd and the kubelet wait for it.",
		why:     "The system disk is missing, contains other data, or fails.",
		next:    "Connect the disk, or correct machine.install.disk. A disk with other data is used only with machine.install.wipe, or if machine.install.diskSelector has its serial number.",
		follows: []string{"maintenance"},
		holds:   func(s *snapshot) []finding { return s.down("disks", "The system disk is not ready.") },
	},
	{
		id: "disk-full", severity: failure,
		sees:  "The console says that STATE or EPHEMERAL is full; no space left on device in logs; images can't be pulled; etcd and the kubelet end.",
		why:   "A file system of the node is full.",
		next:  "Remove data from it, usually unused images (gbctl -n NODE images -k, then images rm -k IMAGE) and logs of pods (gbctl -n NODE ls -l /var), or give the machine a larger disk.",
		holds: func(s *snapshot) []finding { return s.filled(0, full) },
	},
	{
		id: "disk-nearly-full", severity: warning,
		sees: "Pods are evicted; DiskPressure on the node.",
		why:  "A file system of the node is nearly full. Below 15 % of free space the kubelet removes images that no container uses, and below 10 % it evicts pods.",
		next: "Remove data from it, or give the machine a larger disk.",
		holds: func(s *snapshot) []finding {
			if s.mode == boot.Container {
				return nil // it is the host's, and not this node's doing
			}
			return s.filled(full, nearlyFull)
		},
	},
	{
		id: "memory-low", severity: warning,
		sees: "Processes end with status 137; pods are evicted.",
		why:  "The programs on this node need more memory than the machine has.",
		next: "Look at gbctl processes and gbctl memory. Run less on this node, or give it more memory: 2 GiB for a control plane or 1 GiB for a worker, and the memory that the pods need.",
		holds: func(s *snapshot) []finding {
			f := s.files
			if f.memory == 0 || f.available*100 >= f.memory*lowMemory || f.available >= lowMemoryBytes {
				return nil
			}
			return one(finding{what: fmt.Sprintf("Only %s of %s memory are available.", inBytes(f.available), inBytes(f.memory)),
				evidence: []string{fmt.Sprintf("/proc/meminfo: MemTotal: %d kB, MemAvailable: %d kB", f.memory>>10, f.available>>10)}})
		},
	},
}

const (
	// startTime is what a machine may take for its services to come up: under
	// emulation a minute and more.
	startTime = 2 * time.Minute
)

// filled are file systems with at least and less than that much room, in percent.
func (s *snapshot) filled(least, less uint64) (out []finding) {
	for _, sp := range s.files.spaces {
		bytes, nodes := sp.free*100/sp.size, uint64(100)
		if sp.nodes > 0 {
			nodes = sp.left * 100 / sp.nodes
		}
		left := min(bytes, nodes)
		if left < least || left >= less {
			continue
		}
		f := finding{what: fmt.Sprintf("%s (%s) has %s of %s left.", sp.label, sp.path, inBytes(sp.free), inBytes(sp.size))}
		if nodes < bytes {
			f.what = fmt.Sprintf("%s (%s) has room for %d more files of %d.", sp.label, sp.path, sp.left, sp.nodes)
		}
		f.evidence = []string{fmt.Sprintf("statfs %s: %d of %d bytes, %d of %d inodes free", sp.path, sp.free, sp.size, sp.left, sp.nodes)}
		for _, svc := range s.services {
			if svc.Reason == reason.NoSpace || svc.Reason == containerd.ImageNoSpace {
				f.evidence = append(f.evidence, svc.asStatus())
			}
		}
		out = append(out, f)
	}
	return out
}

func inBytes(n uint64) string {
	if n < 10<<30 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d GiB", n>>30)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
