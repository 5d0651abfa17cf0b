// Package selfhosted makes the control plane of a new development cluster self-hosted, as the
// releases before static pods did it: its programs run as DaemonSets of the cluster itself,
// and a pod-checkpointer on each control plane keeps copies of their pods, because without
// them no API server would start after a reboot. Such clusters are there to test the
// conversion to static pods.
//
//	static pods and their files ──► Secrets and DaemonSets ──► checkpoints on the nodes
//	──► mark in etcd, configurations in the old format ──► reboot of all nodes
package selfhosted

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/patch"
	"github.com/garboard-os/garboard/qemu"
)

const (
	// budget is for each of the waits. Pods pull images, and crash and start again until their
	// ports are free.
	budget = 10 * time.Minute
	// budgetEmulated is for nodes that QEMU emulates.
	budgetEmulated = time.Hour
	poll           = time.Second
	// progressInterval is how often a wait prints its reason.
	progressInterval = 5 * time.Second

	stateDir = "/var/lib/pod-checkpointer"
	// oldFormat removes what configurations of those releases don't have.
	oldFormat = `[{op: remove, path: /cluster/aggregatorCA}, {op: remove, path: /cluster/serviceAccount}]`
)

// conversion is a conversion under way.
type conversion struct {
	cluster *qemu.Cluster
	all     []qemu.Node // without those that are turned on later
	control []qemu.Node // the control planes of them
	nodes   machines
	kube    *kube
	out     io.Writer
	start   time.Time
}

// Convert makes the control plane of a ready cluster self-hosted, and waits until the cluster
// serves again. Its images must have the pod-checkpointer (qemu.Options.SelfHosted). It can't
// be repeated.
func Convert(ctx context.Context, c *qemu.Cluster, out io.Writer) error {
	nodes, err := newMachines(c)
	if err != nil {
		return err
	}
	api, err := c.KubeAPI()
	if err != nil {
		return err
	}
	s := &conversion{cluster: c, nodes: nodes, kube: &kube{api}, out: out, start: time.Now()}
	s.all = slices.DeleteFunc(slices.Clone(c.Nodes), func(n qemu.Node) bool { return n.Later })
	s.control = slices.DeleteFunc(slices.Clone(s.all), func(n qemu.Node) bool { return n.Type == string(config.Worker) })
	for _, step := range []struct {
		what string
		run  func(context.Context) error
	}{
		{"making the control plane's programs pods of the cluster", s.createPods},
		{"waiting for checkpoints of the pods", s.awaitCheckpoints},
		{"marking the cluster as self-hosted in etcd", s.mark},
		{"changing the configurations of the control planes to the old format", s.changeFormat},
		{"rebooting all nodes", s.reboot},
		{"waiting for the self-hosted control plane", s.awaitSelfHosted},
	} {
		s.say(step.what)
		if err := step.run(ctx); err != nil {
			return fmt.Errorf("make the control plane of cluster %s self-hosted: %s: %w\n'gbctl cluster destroy --name %s' removes the cluster; create it again then", c.Name, step.what, err, c.Name)
		}
	}
	return nil
}

func (s *conversion) say(text string) {
	fmt.Fprintf(s.out, "%6.1fs  %s\n", time.Since(s.start).Seconds(), strings.Join(strings.Fields(text), " "))
}

// limit is how long a wait may take.
func (s *conversion) limit() time.Duration {
	if s.cluster.Accelerator == "tcg" {
		return budgetEmulated
	}
	return budget
}

// waiting returns a function that prints from time to time why a wait goes on.
func (s *conversion) waiting() func(why error) {
	last := time.Now()
	return func(why error) {
		if time.Since(last) >= progressInterval {
			last = time.Now()
			s.say("… " + why.Error())
		}
	}
}

// await repeats a check until it returns nil.
func (s *conversion) await(ctx context.Context, check func(context.Context) error) error {
	limit := s.limit()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for waiting := s.waiting(); ; {
		err := check(ctx)
		if err == nil || refused(err) {
			return err
		}
		waiting(err)
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return fmt.Errorf("not within %s: %w", limit, err)
			}
			return ctx.Err()
		case <-time.After(poll):
		}
	}
}

// onEach calls a function for several nodes at the same time.
func onEach(nodes []qemu.Node, call func(i int, n qemu.Node) error) error {
	errs := make([]error, len(nodes))
	var all sync.WaitGroup
	for i, n := range nodes {
		all.Go(func() {
			if err := call(i, n); err != nil {
				errs[i] = fmt.Errorf("%s: %w", n.Name, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// createPods makes all objects of the self-hosted control plane.
func (s *conversion) createPods(ctx context.Context) error {
	pods, err := s.nodes.staticPods(ctx, s.control[0])
	if err != nil {
		return err
	}
	objects := manifests("checkpointer")
	files := map[string]map[string][]byte{}
	for _, name := range programs {
		pod, found := pods[name]
		if !found {
			return fmt.Errorf("%s: no static pod %s: 'gbctl -n %s get staticpods' lists them", s.control[0].Name, name, s.control[0].Address)
		}
		set, dirs := daemonSet(name, pod)
		if files[name], err = s.filesOf(ctx, dirs); err != nil {
			return err
		}
		objects = append(objects, set)
	}
	if err := s.certificates(ctx, files); err != nil {
		return err
	}
	for name, data := range files {
		objects = append([]object{secret(name, data)}, objects...)
	}
	for _, o := range append(objects, checkpointerDaemonSet()) {
		if err := s.await(ctx, func(ctx context.Context) error { return s.kube.apply(ctx, o) }); err != nil {
			return err
		}
	}
	return nil
}

// filesOf returns the files of several directories of the first control plane, by name.
func (s *conversion) filesOf(ctx context.Context, dirs []string) (map[string][]byte, error) {
	all := map[string][]byte{}
	for _, dir := range dirs {
		files, err := s.nodes.files(ctx, s.control[0], dir)
		if err != nil {
			return nil, err
		}
		for name, data := range files {
			if _, twice := all[name]; twice {
				return nil, fmt.Errorf("two directories of %v have a file %s, but a Secret has no directories", dirs, name)
			}
			all[name] = data
		}
	}
	return all, nil
}

// awaitCheckpoints waits until each control plane can start all programs by itself.
func (s *conversion) awaitCheckpoints(ctx context.Context) error {
	return s.await(ctx, func(ctx context.Context) error {
		return onEach(s.control, func(_ int, n qemu.Node) error {
			for _, program := range append([]string{checkpointer}, programs...) {
				if err := s.nodes.has(ctx, n, stateDir+"/inactive", prefix(program)); err != nil {
					return err
				}
			}
			return s.nodes.has(ctx, n, stateDir+"/manifests", prefix(checkpointer))
		})
	})
}

// prefix begins the names of the files of a program's checkpoints.
func prefix(program string) string { return namespace + "-" + program + "-" }

// mark writes the mark of a self-hosted control plane to etcd. A pod does it, because nothing
// on this machine reaches the nodes' network.
func (s *conversion) mark(ctx context.Context) error {
	pod := markPod(s.control[0].Name)
	if err := s.await(ctx, func(ctx context.Context) error { return s.kube.apply(ctx, pod) }); err != nil {
		return err
	}
	if err := s.await(ctx, func(ctx context.Context) error { return s.kube.succeeded(ctx, pod) }); err != nil {
		return err
	}
	return s.await(ctx, func(ctx context.Context) error { return s.kube.remove(ctx, pod) })
}

// changeFormat stages configurations in the old format for the next boot.
func (s *conversion) changeFormat(ctx context.Context) error {
	return onEach(s.control, func(_ int, n qemu.Node) error {
		current, err := s.nodes.config(ctx, n)
		if err != nil {
			return err
		}
		document, err := patch.Apply(current.Document, []byte(oldFormat))
		if err != nil {
			return err
		}
		return s.nodes.apply(ctx, n, &apiv1.ApplyConfigRequest{Document: document, Base: current.Digest, Mode: apiv1.ApplyMode_APPLY_MODE_ON_REBOOT})
	})
}

// reboot reboots all nodes at the same time, and waits until they have started again.
func (s *conversion) reboot(ctx context.Context) error {
	before := make([]string, len(s.all))
	err := onEach(s.all, func(i int, n qemu.Node) (err error) {
		before[i], err = s.nodes.bootID(ctx, n)
		return err
	})
	if err != nil {
		return err
	}
	if err := onEach(s.all, func(_ int, n qemu.Node) error { return s.nodes.reboot(ctx, n) }); err != nil {
		return err
	}
	return s.await(ctx, func(ctx context.Context) error {
		return onEach(s.all, func(i int, n qemu.Node) error {
			id, err := s.nodes.bootID(ctx, n)
			if err == nil && id == before[i] {
				err = errors.New("shuts down")
			}
			return err
		})
	})
}

// awaitSelfHosted waits until the cluster serves with the pods of its DaemonSets alone.
func (s *conversion) awaitSelfHosted(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, s.limit())
	defer cancel()
	err := s.cluster.WaitReady(limited, func(m qemu.Milestone) { s.say(m.What) }, s.waiting())
	if err != nil {
		return err
	}
	return s.await(ctx, func(ctx context.Context) error {
		err := onEach(s.control, func(_ int, n qemu.Node) error {
			return errors.Join(s.nodes.selfHosted(ctx, n), s.nodes.only(ctx, n, stateDir+"/manifests", prefix(checkpointer)))
		})
		if err != nil {
			return err
		}
		for _, program := range append([]string{checkpointer}, programs...) {
			if err := s.kube.allReady(ctx, program, len(s.control)); err != nil {
				return err
			}
		}
		return nil
	})
}
