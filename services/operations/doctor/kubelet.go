package doctor

import (
	"strings"
	"time"

	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
)

// bootstrapTime is what a cluster's first start may take: images over a slow line,
// or an emulated machine.
const bootstrapTime = 5 * time.Minute

var kubeletConditions = []condition{
	{
		id: "kubelet-not-running", severity: failure,
		sees:    "Service kubelet isn't up. No pod of this node starts, and on a control plane no API server.",
		why:     "The cause is mostly a wrong argument in machine.kubelet.extraArgs.",
		next:    "Its last log lines show what is missing; gbctl logs kubelet shows the rest.",
		follows: []string{"maintenance", "disks-not-ready", "disk-full", "network-no-address", "service-failing", "service-stopped", "image-pull-failing", "image-pulling", "secrets-missing"},
		holds:   kubeletDown,
	},
}

func kubeletDown(s *snapshot) []finding {
	if s.config == nil {
		return nil
	}
	found := s.down(kubelet.ID, "The kubelet is not running.")
	for i := range found {
		f := &found[i]
		k := s.config.Machine.Kubelet
		if why, next, ok := explainArgument(strings.Join(f.evidence, "\n"), "machine.kubelet.extraArgs", k.Image, k.ExtraArgs); ok {
			f.why, f.next = why, next
			continue
		}
		if svc := s.services[kubelet.ID]; svc.State == dag.Running {
			f.what = "The kubelet runs and is not healthy."
			f.why = "Its health check fails; its last log lines show why."
		}
	}
	return found
}
