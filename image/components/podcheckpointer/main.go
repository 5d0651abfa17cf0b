// Program pod-checkpointer keeps the pods of a self-hosted control plane alive without the
// API server: it keeps a copy of each pod with the annotation
// checkpointer.alpha.coreos.com/checkpoint on its node, and makes the kubelet run the copy as
// a static pod while the pod itself doesn't run. The program of the same name in clusters of
// bootkube does that, too; this one is for development clusters.
//
//	API server ──pods, Secrets, ConfigMaps──► checkpoints in files ──► static pods
//	containerd ──ready sandboxes────────────► checkpoint.Decider ──────┘
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/garboard-os/garboard/image/components/podcheckpointer/checkpoint"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	core "k8s.io/api/core/v1"
	client "k8s.io/client-go/kubernetes/typed/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	period  = 3 * time.Second
	timeout = 5 * time.Second // of one request
)

// program is a running pod-checkpointer.
type program struct {
	kubeconfig, node string
	store            store
	runtime          cri.RuntimeServiceClient
	decider          checkpoint.Decider

	api    client.CoreV1Interface // nil until the kubeconfig could be read
	errors map[string]string
}

func main() {
	p := &program{errors: map[string]string{}}
	flag.StringVar(&p.kubeconfig, "kubeconfig", "/etc/kubernetes/secrets/kubeconfig", "access to the Kubernetes API, with a client certificate")
	flag.StringVar(&p.node, "node", os.Getenv("NODE_NAME"), "name of this node in Kubernetes")
	flag.StringVar(&p.store.dir, "dir", "/var/lib/pod-checkpointer", "directory of the checkpoints, at the same path as on the node")
	flag.StringVar(&p.store.static, "static-pods", "/etc/kubernetes/manifests", "the kubelet's directory of static pods")
	socket := flag.String("containerd", "/run/containerd/containerd.sock", "socket of the container runtime")
	flag.DurationVar(&p.decider.Grace, "grace-period", 5*time.Minute, "how long a pod must be deleted before its checkpoint is removed")
	flag.Parse()
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, os.Interrupt)
	go func() { <-end; os.Exit(0) }() // files are replaced in one step
	if p.node == "" {
		fmt.Fprintln(os.Stderr, "pod-checkpointer: no name of the node: use --node, or set NODE_NAME")
		os.Exit(2)
	}
	connection, err := grpc.NewClient("unix://"+*socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Fprintf(os.Stderr, "pod-checkpointer: --containerd %s: %v\n", *socket, err)
		os.Exit(2)
	}
	p.runtime = cri.NewRuntimeServiceClient(connection)
	p.awaitLock()
	for ticker := time.NewTicker(period); !p.look(context.Background()); <-ticker.C {
	}
	say("pod-checkpointer was deleted: this waits for the kubelet to end it")
	select {} // until a signal
}

// awaitLock waits until no other instance works on this node: the pod of the DaemonSet and
// its checkpoint both run. The lock ends with the process.
func (p *program) awaitLock() {
	path := filepath.Join(p.store.dir, "lock")
	for {
		err := os.MkdirAll(p.store.dir, dirMode)
		if err == nil {
			var fd int
			if fd, err = syscall.Open(path, syscall.O_RDWR|syscall.O_CREAT|syscall.O_CLOEXEC, fileMode); err == nil {
				if err = syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
					p.report("lock", nil, "")
					return
				}
				syscall.Close(fd)
			}
		}
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = errors.New("the other instance works, this one waits for its end")
		}
		p.report("lock", fmt.Errorf("lock %s: %w", path, err), "it is tried again")
		time.Sleep(time.Second)
	}
}

// report prints an error with what happens next, and later that it is over. It doesn't repeat
// an error.
func (p *program) report(what string, err error, next string) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	switch {
	case text == p.errors[what]:
		return
	case text == "":
		say("%s: works again", what)
	default:
		say("%s: %s; %s", what, text, next)
	}
	p.errors[what] = text
}

func say(format string, args ...any) {
	fmt.Printf(time.Now().UTC().Format(time.RFC3339)+" "+format+"\n", args...)
}

// look does what one look at the node needs. It returns true when this program was deleted,
// and has removed all checkpoints.
func (p *program) look(ctx context.Context) (end bool) {
	l := checkpoint.Look{Now: time.Now()}
	parents, err := p.parents(ctx)
	p.report("API server", err, "the checkpoints stay as they are")
	if err == nil {
		l.Parents = map[string]bool{}
	}
	for _, pod := range parents {
		id := checkpoint.ID(pod)
		l.Parents[id] = true
		p.report("checkpoint of "+id, p.write(ctx, id, pod), "an older checkpoint stays as it is")
	}
	l.Running, err = p.running(ctx)
	p.report("containerd", err, "no checkpoint is activated or deactivated")
	l.Checkpoints, err = p.store.load()
	p.report("checkpoints in "+p.store.dir, err, "nothing is activated, deactivated or removed")
	if err != nil {
		return false
	}
	actions := p.decider.Decide(l)
	for _, id := range actions.Activate {
		changed, err := p.store.activate(id)
		p.report("activation of "+id, err, "it is tried again")
		if changed {
			say("%s: checkpoint is active", id)
		}
	}
	for _, id := range actions.Deactivate {
		say("%s: runs, its checkpoint is deactivated", id)
		p.report("deactivation of "+id, p.store.deactivate(id), "it is tried again")
	}
	for _, id := range actions.Remove {
		say("%s: was deleted, its checkpoint is removed", id)
		err := p.store.remove(id)
		p.report("removal of "+id, err, "it is tried again")
		if err != nil {
			return false
		}
	}
	return actions.End
}

// write writes the checkpoint of a parent, with the files that it needs first.
func (p *program) write(ctx context.Context, id string, pod *core.Pod) error {
	sources, err := checkpoint.Manifest(pod, p.store.dir)
	if err != nil {
		return err
	}
	files := map[string]map[string][]byte{} // by directory: volumes may share one
	for _, source := range sources {
		namespace, _, _ := strings.Cut(id, "/")
		some, err := p.files(ctx, namespace, source)
		if err != nil {
			return err
		}
		if files[source.Dir] == nil {
			files[source.Dir] = map[string][]byte{}
		}
		maps.Copy(files[source.Dir], some)
	}
	for dir, some := range files {
		if err := p.store.writeSource(dir, some); err != nil {
			return err
		}
	}
	data, err := json.Marshal(pod)
	if err != nil {
		return err
	}
	wrote, err := replace(p.store.inactive(id), data)
	if wrote {
		say("%s: checkpoint is written", id)
	}
	return err
}

// running returns the IDs of the pods with a ready sandbox, true with a container in it.
func (p *program) running(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	sandboxes, err := p.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{
		Filter: &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}},
	})
	containers, failed := p.runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err := errors.Join(err, failed); err != nil {
		return nil, err
	}
	running := map[string]bool{}
	for _, s := range sandboxes.Items {
		running[s.Labels["io.kubernetes.pod.namespace"]+"/"+s.Labels["io.kubernetes.pod.name"]] =
			slices.ContainsFunc(containers.Containers, func(c *cri.Container) bool { return c.PodSandboxId == s.Id })
	}
	return running, nil
}
