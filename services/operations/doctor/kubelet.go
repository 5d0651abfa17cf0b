package doctor

import (
	"encoding/base64"
	"fmt"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/kubernetes/kubelet"
	"github.com/garboard-os/garboard/services/kubernetes/roster"
)

// bootstrapTime is what a cluster's first start may take: images over a slow line,
// or an emulated machine.
const bootstrapTime = 5 * time.Minute

// nameTime is longer than the pause between two requests of a kubelet for a certificate.
const nameTime = 3 * time.Minute

var kubeletConditions = checks{
	"node-name-taken":     nameTaken,
	"kubelet-not-running": kubeletDown,
}

// nameTaken is said on both machines: by the kubelet that waits, and by the requests that were
// denied since the other one has been up.
func nameTaken(s *snapshot) []finding {
	svc := s.services[kubelet.ID]
	if !svc.Up && svc.Reason == roster.NameTaken {
		return one(finding{what: fmt.Sprintf("Another machine has the name %q, so this one doesn't register.", s.hostname), since: s.at(svc.Since), evidence: []string{svc.asStatus()}})
	}
	if !svc.Up || s.cluster == nil {
		return nil
	}
	for _, csr := range s.cluster.csrs {
		text, _ := base64.StdEncoding.DecodeString(csr.Text("spec", "request"))
		request, err := pki.ParseRequest(text)
		if err != nil || request.Subject.CommonName != config.NodeUser+s.hostname {
			continue
		}
		for _, c := range csr.List("status", "conditions") {
			if at := c.Time("lastTransitionTime"); c.Text("reason") == string(roster.NameTaken) && at.After(s.at(svc.Since)) && s.now.Sub(at) < nameTime {
				return one(finding{what: fmt.Sprintf("Another machine wants the name %q of this node, and doesn't get it.", s.hostname), severity: warning, evidence: []string{asRequest(csr)}})
			}
		}
	}
	return nil
}

func kubeletDown(s *snapshot) []finding {
	if s.config == nil {
		return nil
	}
	found := s.down(kubelet.ID, "The kubelet is not running.")
	if s.services[kubelet.ID].Reason == kubelet.NodeDeleted {
		return nil // node-not-registered says so
	}
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
