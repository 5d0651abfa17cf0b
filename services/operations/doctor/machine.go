package doctor

import (
	"fmt"
	"time"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/reason"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/containerd"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/volumes"
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

var machineConditions = checks{
	"look-unanswered": func(s *snapshot) []finding {
		return one(finding{what: "Not everything could be examined within " + collectBudget.String() + ".", evidence: s.silent})
	},
	"maintenance": func(s *snapshot) []finding {
		if s.stage != configuration.Maintenance || s.config != nil {
			return nil
		}
		f := finding{what: "The node has no configuration and is in maintenance mode."}
		if svc, ok := s.services[configuration.ID]; ok {
			f.since, f.evidence = s.at(svc.Since), []string{svc.asStatus()}
			f.code = svc.Reason
		}
		return one(f)
	},
	"disk-locked": func(s *snapshot) []finding {
		svc := s.services[configuration.ID]
		return when(s.stage == configuration.Locked, finding{what: "No key of this machine opens STATE.", since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
	},
	"recovery-key-missing": func(s *snapshot) []finding {
		return lists.Of(s.unrecoverable, func(o resource.Object[volumes.Status]) finding {
			return finding{what: o.ID + " is encrypted without a recovery key.", evidence: []string{"VolumeStatus " + o.ID + ": " + o.Spec.Layers}}
		})
	},
	"secrets-missing": func(s *snapshot) []finding {
		return lists.Some(s.controllers, func(c resource.Object[resource.Failure]) (finding, bool) {
			f := finding{what: "The configuration is incomplete: " + c.Spec.Error + ".", since: c.Spec.Since, evidence: []string{asFailure(c)}}
			return f, c.Spec.Reason == secrets.Missing
		})
	},
	"disks-not-ready": func(s *snapshot) []finding { return s.down("disks", "The system disk is not ready.") },
	"disk-full":       func(s *snapshot) []finding { return s.filled(0, full) },
	"disk-nearly-full": func(s *snapshot) []finding {
		if s.mode == boot.Container {
			return nil // it is the host's, and not this node's doing
		}
		return s.filled(full, nearlyFull)
	},
	"memory-low": func(s *snapshot) []finding {
		f := s.files
		low := f.available*100 < f.memory*lowMemory && f.available < lowMemoryBytes
		return when(low, finding{what: fmt.Sprintf("Only %s of %s memory are available.", inBytes(f.available), inBytes(f.memory)),
			evidence: []string{fmt.Sprintf("/proc/meminfo: MemTotal: %d kB, MemAvailable: %d kB", f.memory>>10, f.available>>10)}})
	},
}

// startTime is what a machine may take for its services to come up: under
// emulation a minute and more.
const startTime = 2 * time.Minute

// filled are file systems with at least and less than that much room, in percent.
func (s *snapshot) filled(least, less uint64) []finding {
	return lists.Some(s.files.spaces, func(sp space) (finding, bool) {
		bytes, nodes := sp.free*100/sp.size, uint64(100)
		if sp.nodes > 0 {
			nodes = sp.left * 100 / sp.nodes
		}
		left := min(bytes, nodes)
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
		return f, left >= least && left < less
	})
}

func inBytes(n uint64) string {
	if n < 10<<30 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d GiB", n>>30)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
