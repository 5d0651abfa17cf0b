package main

import (
	"testing"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
)

// What a node lacked before a command excuses the same afterwards, and nothing else.
func TestHealthyAs(t *testing.T) {
	t.Parallel()
	lacks := func(why string, objects ...string) *apiv1.NodeStatusResponse {
		return &apiv1.NodeStatusResponse{Stage: "configured", KubernetesLacks: why, KubernetesFaulty: objects}
	}
	sick := lacks("kube-proxy: CrashLoopBackOff", "DaemonSet kube-system/kube-proxy")
	for name, test := range map[string]struct {
		before, now *apiv1.NodeStatusResponse
		healthy     bool
	}{
		"healthy":                {lacks(""), lacks(""), true},
		"as before":              {sick, lacks("kube-proxy: Error", "DaemonSet kube-system/kube-proxy"), true},
		"healed":                 {sick, lacks(""), true},
		"new":                    {lacks(""), sick, false},
		"another one":            {sick, lacks("Node is NotReady", "Node", "DaemonSet kube-system/kube-proxy"), false},
		"of an earlier release":  {lacks("kube-proxy: Error"), lacks("Node is NotReady"), true},
		"new in an earlier one":  {lacks(""), lacks("Node is NotReady"), false},
		"a service isn't up yet": {sick, &apiv1.NodeStatusResponse{Stage: "configured", Services: 2, ServicesUp: 1}, false},
	} {
		if err := healthyAs(test.before, test.now); (err == nil) != test.healthy {
			t.Errorf("%s: %v", name, err)
		}
	}
}
