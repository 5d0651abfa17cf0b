package convertk8s

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/operations/rollout"
)

var yes = map[string]string{"differences": "yes", "checkpointer": "yes", "apply": "yes"}

// whole is all that a conversion changes, in order.
func whole() []string {
	did := []string{"made garboard-conversion", "n1 complete", "n2 complete", "n3 complete", "no daemonset pod-checkpointer", "key"}
	for _, c := range programs {
		did = append(did, "no daemonset "+c.name)
		for _, n := range []string{"n1", "n2", "n3"} {
			did = append(did, "no pod "+c.name+"."+n, c.name+"/"+n+" static")
		}
	}
	return append(did, "no secret garboard-conversion")
}

// S-290, S-292, S-294, S-299, S-301, Q-18: the steps in their order, on one node after another.
func TestS301ControlPlaneIsConverted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer r.Off()
		o := r.run(&apiv1.ConvertKubernetesRequest{}, yes)
		if o.State != operation.Done {
			t.Fatalf("it ended as %s: %s", o.State, o.Error)
		}
		if diff := cmp.Diff(whole(), r.Did); diff != "" {
			t.Error(diff)
		}
		said := r.said(o.ID)
		for _, lines := range [][]string{
			{`deleting daemonset "pod-checkpointer"`, "checking for active pod checkpoints", "retrying error: found 3 active pod checkpoints: ["},
			{"conversion process completed successfully", aggregated},
		} {
			at := slices.Index(said, lines[0])
			for i, line := range lines {
				if at < 0 || at+i >= len(said) || !strings.HasPrefix(said[at+i], line) {
					t.Errorf("there is no %q in this order:\n%s", lines, strings.Join(said, "\n"))
					break
				}
			}
		}
		text := string(r.nodes[1].document)
		for _, want := range []string{"# kept", "key: a2V5", "image: " + image + "kube-apiserver:v1", image + "kube-scheduler:v1"} {
			if !strings.Contains(text, want) {
				t.Errorf("the configuration of n2 has no %q:\n%s", want, text)
			}
		}
		if _, err := r.start(&apiv1.ConvertKubernetesRequest{}); err == nil || !strings.Contains(err.Error(), "isn't self-hosted") {
			t.Errorf("another conversion: %v", err)
		}
	})
}

// The coordinator loses its power at each change, and the operation goes on.
func TestS303KilledAtEachChange(t *testing.T) {
	t.Parallel()
	for _, cut := range whole() {
		t.Run(cut, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.Cut = cut
				r.boot()
				defer func() { r.Off() }()
				if o := r.run(&apiv1.ConvertKubernetesRequest{Yes: true}, nil); o.State != operation.Done {
					t.Fatalf("it ended as %s: %s", o.State, o.Error)
				}
				if diff := cmp.Diff(whole(), r.Did); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// The only control plane was rebooted when pod-checkpointer was gone: no API server runs
// until the nodes write their static pods.
func TestRebootWithoutCheckpoints(t *testing.T) {
	t.Parallel()
	for _, cut := range []string{"no daemonset pod-checkpointer", "key"} {
		t.Run(cut, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.Cut, r.unstarted = cut, true
				r.boot()
				defer func() { r.Off() }()
				if o := r.run(&apiv1.ConvertKubernetesRequest{}, yes); o.State != operation.Done {
					t.Fatalf("it ended as %s: %s", o.State, o.Error)
				}
				for pod, is := range r.pods {
					if is != "static" {
						t.Errorf("pod %s is %s", pod, is)
					}
				}
			})
		})
	}
}

// S-298, S-300, S-303: the answer no, and an abort, take all back until the second yes.
func TestS303EverythingIsTakenBack(t *testing.T) {
	t.Parallel()
	for question, undone := range map[string][]string{
		"differences":  nil,
		"checkpointer": {"n3 old", "n2 old", "n1 old", "no secret garboard-conversion"},
		"apply":        {"made pod-checkpointer", "n3 old", "n2 old", "n1 old", "no secret garboard-conversion"},
	} {
		t.Run(question, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.nodes[2].document = []byte("cluster: {serviceAccount: {key: a2V5, acceptedKeys: [b2xk]}}\n")
				r.boot()
				defer func() { r.Off() }()
				before := string(r.nodes[1].document)
				answers := map[string]string{}
				for q, a := range yes {
					answers[q] = a
				}
				answers[question] = "no"
				o := r.run(&apiv1.ConvertKubernetesRequest{}, answers)
				if o.State != operation.Failed || !strings.Contains(o.Error, "confirmed") {
					t.Errorf("it ended as %s: %s", o.State, o.Error)
				}
				if did := r.Did[len(r.Did)-len(undone):]; !slices.Equal(did, undone) {
					t.Errorf("undone: %q, want %q", did, undone)
				}
				config, err := rollout.ParseConfig(r.nodes[1].document)
				b := read(config)
				if err != nil || len(b.Lacks) != 2 || b.Images["scheduler"] != "own:1" || b.Images["apiServer"] != "" {
					t.Errorf("the configuration was\n%s\nand is\n%s", before, r.nodes[1].document)
				}
				if text := string(r.nodes[2].document); !strings.Contains(text, "key: a2V5, acceptedKeys: [b2xk]") || strings.Contains(text, "crt:") {
					t.Errorf("the configuration of n3 is\n%s", text)
				}
				if !r.mark || r.sets[checkpointer] == nil {
					t.Error("the control plane isn't self-hosted any more")
				}
				r.Did = nil
				if o := r.run(&apiv1.ConvertKubernetesRequest{}, yes); o.State != operation.Done {
					t.Errorf("the next conversion ended as %s: %s", o.State, o.Error)
				}
			})
		})
	}
}

// S-305, S-306: the key alone is removed once the configurations are complete.
func TestS305OnlyTheKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.boot()
		defer r.Off()
		if _, err := r.start(&apiv1.ConvertKubernetesRequest{RemoveInitializedKey: true}); err == nil || !strings.Contains(err.Error(), "node n1: its configuration has no cluster.aggregatorCA") {
			t.Errorf("incomplete configurations: %v", err)
		}
		for _, m := range r.nodes[:3] {
			m.document = []byte("cluster: {aggregatorCA: {crt: eA==, key: eA==}, serviceAccount: {key: eA==}}\n")
		}
		if o := r.run(&apiv1.ConvertKubernetesRequest{RemoveInitializedKey: true}, nil); o.State != operation.Done || !slices.Equal(r.Did, []string{"key"}) {
			t.Errorf("it ended as %s (%s) and did %q", o.State, o.Error, r.Did)
		}
	})
}

// The plan shows what the static pods have otherwise, and changes nothing.
func TestDryRunShowsDifferences(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for _, m := range r.nodes[:2] {
			m.document = []byte("cluster: {serviceAccount: {key: a2V5}}\n")
		}
		r.key = config.KeyPEM("key")
		dry := func(differs bool) operation.Operation {
			r.boot()
			defer r.Off()
			o, err := r.Runner.Start(t.Context(), operation.Ask{Name: Name, Arguments: &apiv1.ConvertKubernetesRequest{}, DryRun: true})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(o.Warnings, aggregated) {
				t.Errorf("the plan doesn't name the aggregated API; warnings: %q", o.Warnings)
			}
			if slices.ContainsFunc(o.Warnings, func(w string) bool { return strings.Contains(w, "cluster.serviceAccount.key isn't the key") }) != differs {
				t.Errorf("the key for service accounts differs: %v; warnings: %q", differs, o.Warnings)
			}
			return o
		}
		dry(false)
		r.key = config.KeyPEM("x")
		o := dry(true)
		if !slices.ContainsFunc(o.Warnings, func(w string) bool {
			return strings.HasPrefix(w, "kube-apiserver: the DaemonSet has --own-flag=x") && strings.HasSuffix(w, "cluster.apiServer.extraArgs")
		}) {
			t.Errorf("warnings: %q", o.Warnings)
		}
		if !slices.ContainsFunc(o.Warnings, func(w string) bool {
			return strings.HasPrefix(w, "cluster.apiServer.extraArgs.audit-log-path: no entry of extraVolumes")
		}) {
			t.Errorf("nothing about the configured arguments: %q", o.Warnings)
		}
		if len(r.Did) > 0 {
			t.Errorf("it did %q", r.Did)
		}
	})
}

func TestDifferences(t *testing.T) {
	t.Parallel()
	self := object{"spec": object{
		"containers": []any{object{"command": []any{"kube-apiserver", "--same=1", "--file=/old/x", "--advertise-address=$(POD_IP)", "--other=a", "--oidc-client-id=k"}}},
		"volumes":    []any{object{"hostPath": object{"path": "/srv"}}, object{"secret": object{"secretName": "s"}}},
	}}
	static := object{"spec": object{"containers": []any{object{"command": []any{"kube-apiserver", "--same=1", "--file=/new/x", "--advertise-address=10.5.0.2", "--other=b", "--more"}}}}}
	want := []string{
		"kube-apiserver: the DaemonSet has --other=a, and the static pod --other=b",
		"kube-apiserver: the static pod has --more=true, and the DaemonSet doesn't",
		"kube-apiserver: the DaemonSet mounts /srv of the node, and the static pod doesn't: see cluster.apiServer.extraVolumes",
	}
	if diff := cmp.Diff(want, differences(programs[0], self, static, config.Args{"oidc-client-id": {"k"}})); diff != "" {
		t.Error(diff)
	}
}

// The node restarts before the first step: the step waits until the cluster answers.
func TestRestartBeforeTheFirstStep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.Restart.On = true
		r.boot()
		defer func() { r.Off() }()
		if o := r.run(&apiv1.ConvertKubernetesRequest{Yes: true}, nil); o.State != operation.Done {
			t.Errorf("it ended as %s: %s", o.State, o.Error)
		}
	})
}
