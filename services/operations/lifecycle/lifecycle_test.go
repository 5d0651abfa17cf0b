package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/config/pki"
	"github.com/garboard-os/garboard/services/core/operation"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disks"
	"github.com/garboard-os/garboard/services/system/network"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"
)

type object = map[string]any

// rig is a control plane n1, the rest of its cluster, and what is done to both.
type rig struct {
	t      *testing.T
	store  *resource.Store
	dir    string
	runner *operation.Runner
	off    context.CancelFunc // of the boot that is

	mu     sync.Mutex // guards all below
	did    []string
	node   object   // nil: deleted
	stays  bool     // no control plane deletes it when it asks
	pods   []string // that never end
	others int      // nodes besides
	down   bool     // Kubernetes doesn't answer
	cut    string   // the power goes when this is done
	lock   operation.Lock
	system *systems
	may    error // of etcd: whether the member may leave
	stop   error // whether it may be away
	leave  error
	sick   []string      // services
	absent error         // why an image for pods can't be pulled
	power  chan struct{} // closed when the power goes
	dark   chan struct{} // closed when what ran then is gone
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, dir: t.TempDir(), store: resource.NewStore(), others: 2, node: newNode(), sick: []string{"timed"}}
	c, err := config.Generate(config.Options{ClusterName: "test", Endpoint: "https://10.5.0.1:6443", Hostname: "n1", Secrets: keys()})
	if err != nil {
		t.Fatal(err)
	}
	put := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	put(configuration.Configs.Put(r.store.As("test"), configuration.ConfigID, c))
	put(network.Hostnames.Put(r.store.As("test"), network.HostnameID, "n1"))
	put(secrets.Kubernetes.Put(r.store.As("test"), secrets.KubernetesID, secrets.KubernetesSpec{}))
	crt, key, err := keys().MachineCA.CA().Issue(pki.Leaf{CN: "n1", DNS: []string{"n1"}, Server: true, Now: time.Now()})
	put(err)
	put(secrets.API.Put(r.store.As("test"), secrets.APIID, secrets.APISpec{Serving: config.CertKey{Crt: crt, Key: key}}))
	return r
}

var keys = sync.OnceValue(func() *config.Secrets {
	s, err := config.NewSecrets(time.Now())
	if err != nil {
		panic(err)
	}
	return s
})

func newNode() object {
	return object{"metadata": object{"name": "n1", "resourceVersion": "1"}, "spec": object{}, "status": object{}}
}

// userDisks are those of the machine.
var userDisks = map[string]disks.UserDisk{
	"/dev/sdb": {Path: "/dev/sdb", Size: 2 << 40, Model: "BIG", Serial: "s1"}, "/dev/sdc": {Path: "/dev/sdc", Size: 1 << 40},
}

var errCut = errors.New("the power is cut")

// note writes down what is done to the node; the power goes with what is to be cut,
// and nothing is done after it.
func (r *rig) note(what string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.power:
	default:
		r.did = append(r.did, what)
		if r.cut != what {
			return nil
		}
		r.cut = ""
		close(r.power)
	}
	dark := r.dark
	r.mu.Unlock()
	<-dark
	r.mu.Lock()
	return errCut
}

// on is a boot: what ran runs again.
func (r *rig) on() {
	r.t.Helper()
	r.mu.Lock()
	r.power, r.dark = make(chan struct{}), make(chan struct{})
	r.mu.Unlock()
	var installed Systems
	if r.system != nil {
		installed = r.system
	}
	runner, err := operation.New(operation.Options{
		Store: resource.NewStore(), Log: slog.New(slog.DiscardHandler), Dir: r.dir, Lock: r.lock,
		Definitions: Definitions(Options{
			Store: r.store, Etcd: member{r}, Systems: installed, Unhealthy: func() []string { r.mu.Lock(); defer r.mu.Unlock(); return r.sick },
			Start:    func(_ context.Context, id string) error { return r.note("start " + id) },
			Stop:     func(_ context.Context, id string) error { return r.note("stop " + id) },
			StopPods: func(context.Context) error { return r.note("stop pods") },
			Pull:     func(_ context.Context, image string) error { return errors.Join(r.note("pull "+image), r.absent) },
			MarkWipe: func(labels []string, users []disks.UserDisk, mode string) error {
				for _, u := range users {
					labels = append(slices.Clone(labels), u.Path)
				}
				return r.note("mark " + strings.TrimSpace(strings.Join(labels, " ")+" "+mode))
			},
			Wiping: func(mode string, _ []string, _ []disks.UserDisk) ([]string, error) {
				if mode == boot.WipeDiscard {
					return nil, errors.New("/dev/sda can't discard data")
				}
				return []string{"it takes hours"}, nil
			},
			UserDisks: func(names []string) (users []disks.UserDisk, err error) {
				for _, name := range names {
					user, there := userDisks[name]
					if !there {
						return nil, errors.New("there is no disk " + name)
					}
					users = append(users, user)
				}
				return users, nil
			},
			Power: func(p boot.Power, why string) { _ = r.note(string(p)) },
			Kubernetes: func() (*kubeclient.Client, error) {
				return kubeclient.New(kubeclient.Options{Server: "https://api", Transport: r})
			},
		}),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = runner.Run(ctx) })
	r.runner, r.off = runner, func() { cancel(); synctest.Wait(); close(r.dark); wg.Wait() }
	runner.Open()
	synctest.Wait() // the journals are read
}

// run asks for an operation and lets it come to its end, or to that of the node.
func (r *rig) run(name string, arguments any) operation.Operation {
	r.t.Helper()
	o, err := r.runner.Start(context.Background(), operation.Ask{Name: name, Arguments: arguments, By: "somebody"})
	if err != nil {
		r.t.Fatal(err)
	}
	return r.end(o.ID)
}

func (r *rig) end(id string) operation.Operation {
	r.t.Helper()
	for {
		o, err := r.runner.Get(id)
		if err != nil {
			r.t.Fatal(err)
		}
		ended := o.Finished()
		r.mu.Lock()
		select {
		case <-r.power:
			ended = true
		default:
		}
		if len(r.did) > 0 {
			last := r.did[len(r.did)-1]
			ended = ended || last == string(boot.Reboot) || last == string(boot.PowerOff)
		}
		r.mu.Unlock()
		if ended {
			time.Sleep(10 * time.Second) // those who watch hear of it before the node ends
			return o
		}
		time.Sleep(time.Second) // of the bubble
	}
}

func (r *rig) done() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	did := slices.Clone(r.did)
	r.did = nil
	return did
}

type member struct{ r *rig }

func (m member) MayLeave(context.Context, time.Duration) error { return m.r.may }

func (m member) MayStop(context.Context, time.Duration) error {
	m.r.mu.Lock()
	defer m.r.mu.Unlock()
	return m.r.stop
}

func (m member) Leave(context.Context) (string, error) {
	if m.r.leave != nil {
		return "", m.r.leave
	}
	return "n1 (8e9e)", m.r.note("leave etcd")
}

func (m member) Settled(context.Context) error { return m.r.note("see etcd settled") }

// RoundTrip is the API server.
func (r *rig) RoundTrip(q *http.Request) (*http.Response, error) {
	r.mu.Lock()
	down := r.down
	r.mu.Unlock()
	if down {
		<-q.Context().Done()
		return nil, q.Context().Err()
	}
	w := httptest.NewRecorder()
	r.answer(w, q)
	return w.Result(), nil
}

const discovery = `{"kind":"APIGroupDiscoveryList","items":[{"metadata":{},"versions":[{"version":"v1","resources":[
	{"resource":"pods","scope":"Namespaced","responseKind":{"kind":"Pod"}},{"resource":"nodes","scope":"Cluster","responseKind":{"kind":"Node"}}]}]}]}`

func (r *rig) answer(w http.ResponseWriter, q *http.Request) {
	switch path := q.URL.Path; {
	case path == "/api" || path == "/apis":
		io.WriteString(w, discovery)
	case path == "/api/v1/nodes":
		items := []object{newNode()}
		for i := range r.others {
			items = append(items, object{"metadata": object{"name": fmt.Sprintf("n%d", i+2)}, "status": object{"conditions": []object{{"type": "Ready", "status": "True"}}}})
		}
		json.NewEncoder(w).Encode(object{"items": items})
	case path == "/api/v1/pods":
		var items []object
		for _, name := range r.pods {
			items = append(items, object{"metadata": object{"namespace": "ns", "name": name, "uid": name, "deletionTimestamp": "2026-01-01T00:00:00Z",
				"ownerReferences": []object{{"kind": "ReplicaSet", "controller": true}}}})
		}
		json.NewEncoder(w).Encode(object{"items": items})
		_ = r.note("look at pods")
	case r.node == nil:
		w.WriteHeader(http.StatusNotFound)
	case q.Method == http.MethodGet:
		json.NewEncoder(w).Encode(r.node)
	case q.Method == http.MethodDelete:
		r.node = nil
		_ = r.note("delete node")
		io.WriteString(w, "{}")
	default:
		r.patch(w, q)
	}
}

func (r *rig) patch(w http.ResponseWriter, q *http.Request) {
	var p kubeclient.Object
	_ = json.NewDecoder(q.Body).Decode(&p)
	meta := r.node["metadata"].(object)
	annotations, _ := meta["annotations"].(object)
	annotations = maps.Clone(annotations)
	if annotations == nil {
		annotations = object{}
	}
	changed, _ := p.At("metadata", "annotations").(object)
	for key, value := range changed {
		if annotations[key] = value; value == nil {
			delete(annotations, key)
		}
	}
	meta["annotations"] = annotations
	if spec, ok := p["spec"].(object); ok && spec["unschedulable"] == true {
		r.node["spec"] = spec
		_ = r.note("cordon")
	} else if ok {
		r.node["spec"] = object{}
		_ = r.note("uncordon")
	} else if annotations[kubeclient.Leaving] == nil {
		_ = r.note("stay")
	} else {
		if !r.stays {
			r.node = nil // a control plane sees to it
		}
		_ = r.note("ask to leave")
	}
	io.WriteString(w, "{}")
}

func check(t *testing.T, r *rig, o operation.Operation, state operation.State, want ...string) {
	t.Helper()
	if o.State != state {
		t.Errorf("%s is %s (%s), want %s", o.ID, o.State, o.Error, state)
	}
	if diff := cmp.Diff(want, r.done()); diff != "" {
		t.Errorf("done (-want +got):\n%s", diff)
	}
}

var leaveInOrder = []string{"cordon", "look at pods", "stop kubelet", "delete node", "stop pods", "leave etcd"}

func TestArguments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.on()
		defer r.off()
		for name, arguments := range map[string]any{
			Reset: &apiv1.ResetRequest{SystemLabelsToWipe: []string{"BOOT-A"}}, Reboot: &apiv1.RebootRequest{DrainTimeout: durationpb.New(-1)}, Shutdown: "garbage",
		} {
			if _, err := r.runner.Start(t.Context(), operation.Ask{Name: name, Arguments: arguments, DryRun: true}); err == nil {
				t.Errorf("%s %s is taken", name, arguments)
			}
		}
	})
}

// Arguments as releases before the messages of the API wrote them.
func TestArgumentsOfEarlierReleases(t *testing.T) {
	t.Parallel()
	read := func(name, arguments string) job {
		j, err := Options{}.job(name, operation.Request{Arguments: []byte(arguments)})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return j
	}
	if j := read(Upgrade, `{"keepPods":true,"drainTimeout":600000000000,"image":"i:1","older":true,"stage":true,"wipe":true}`); !j.KeepPods ||
		j.drainTimeout != 10*time.Minute || j.Image != "i:1" || !j.AllowOlder || !j.Stage || len(j.labels) != 1 {
		t.Errorf("an upgrade is %v", j.UpgradeSystemRequest)
	}
	if j := read(Shutdown, `{"button":true,"drainTimeout":30000000000}`); !j.button || j.drainTimeout != buttonDrain {
		t.Errorf("the power button is %v", j.UpgradeSystemRequest)
	}
	j := read(Reset, `{"force":true,"reboot":true,"wipe":["EPHEMERAL"],"disks":[{"path":"/dev/sdb","size":5,"serial":"s1"}],"drainTimeout":60000000000}`)
	if !j.Force || j.power != boot.Reboot || !slices.Equal(j.labels, []string{boot.LabelEphemeral}) || j.disks[0].Serial != "s1" || j.drainTimeout != time.Minute {
		t.Errorf("a reset wipes %v and %v, and is %v", j.labels, j.disks, j.UpgradeSystemRequest)
	}
}
