package controlplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/lists"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/services/system/configuration"
)

const (
	// applyMutex, in etcd, lets one control plane at a time make the missing objects.
	applyMutex = "/garboard.dev/manifests"
	// applyTTL: if a node dies while it holds the mutex, etcd releases it after
	// that many seconds.
	applyTTL = 30
	// applyBudget bounds one attempt, most of which is waiting for the mutex.
	applyBudget = 2 * time.Minute
	// releaseBudget is for the release of the mutex in etcd after a node was
	// stopped: otherwise the others would wait for applyTTL.
	releaseBudget = 2 * time.Second

	// readyWait is how long one attempt waits for the apiserver before it fails;
	// readyPoll is how often it asks. The first start takes some seconds, or a
	// minute under emulation. The wait keeps the log short and avoids the growing
	// pauses after failures.
	readyWait = 20 * time.Second
	readyPoll = 250 * time.Millisecond
)

// ManifestApplyController makes the missing objects of the bootstrap manifests. It never
// changes or removes one: once made, they belong to the cluster's owner.
type ManifestApplyController struct {
	client kubeclient.Kept
	made   map[string]bool // keys in etcd, as far as this node has seen them
}

func (c *ManifestApplyController) Reconcile(ctx context.Context, v resource.View) (time.Duration, error) {
	manifests := inOrder(BootstrapManifests.List(v))
	if err := forget(v, ManifestResults, manifests); err != nil {
		return 0, err
	}
	keys, member, ready, err := ownCluster(v)
	_, none := secrets.Etcd.Get(v, secrets.EtcdID)
	if err = cmp.Or(err, resource.IgnoreNotFound(none)); err != nil || none != nil || !ready {
		return 0, err
	}
	if err := c.client.Use(throughBalancer(keys)); err != nil {
		return 0, err
	}
	defer c.client.Close()
	ctx, cancel := context.WithTimeout(ctx, applyBudget)
	defer cancel()
	waitReady(ctx, c.client.Client)
	a := &application{client: c.client.Client, log: v.Log(), made: c.made}
	// Check first: almost always nothing is to be done, and then no mutex is needed.
	if err := a.look(ctx, manifests); err != nil {
		return 0, err
	}
	if slices.ContainsFunc(a.parts, a.open) {
		err = withMutex(ctx, v, member.Endpoint, func(ctx context.Context, kv clientv3.KV) error {
			if a.made, err = readMade(ctx, kv); err != nil {
				return err
			}
			return a.make(ctx, func(key string) error {
				_, err := kv.Put(ctx, key, "")
				return err
			})
		})
	}
	c.made = a.made
	for _, p := range a.parts {
		err = errors.Join(err, p.why)
	}
	for _, m := range manifests {
		err = errors.Join(err, ManifestResults.In(m.Namespace).Put(v, m.ID, a.result(m.Meta)))
	}
	return 0, err
}

// ownCluster is what reaches the cluster, once the member of etcd on this node is ready, and if the
// control plane isn't self-hosted.
func ownCluster(r resource.Reader) (keys secrets.KubernetesSpec, member etcd.StatusSpec, ready bool, err error) {
	status, err := BootstrapStatuses.Get(r, "control-plane")
	found, none := secrets.Kubernetes.Get(r, secrets.KubernetesID)
	member, ready = etcd.Ready(r)
	err = cmp.Or(err, none)
	return found.Spec, member, ready && err == nil && !status.Spec.SelfHosted, resource.IgnoreNotFound(err)
}

// WantedObjects are the objects of all bootstrap manifests, in the order of their IDs.
func WantedObjects(r resource.Reader) []kubeclient.Object {
	objects := func(o resource.Object[Manifest]) []kubeclient.Object { return o.Spec.Objects }
	return slices.Concat(lists.Of(inOrder(BootstrapManifests.List(r)), objects)...)
}

// waitReady gives the apiserver some time to start. If it isn't ready after
// that, the first request returns the error.
func waitReady(ctx context.Context, client *kubeclient.Client) {
	ctx, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	for client.Ready(ctx) != nil && sleep.For(ctx, readyPoll) {
	}
}

// EncryptAgain writes all Secrets as they are. API servers keep those that are as they should be in etcd, and write
// those that they have read with another key than the present one. It can be done again at any time.
func EncryptAgain(ctx context.Context, client *kubeclient.Client) error {
	list, err := client.Metadata(ctx, kubeclient.Ref{APIVersion: "v1", Kind: "Secret"})
	for _, o := range list.Items() {
		ref := kubeclient.Ref{APIVersion: "v1", Kind: "Secret", Namespace: o.Namespace(), Name: o.Name()}
		if _, err := client.Merge(ctx, ref, kubeclient.Object{}); kubeclient.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return err
}

// AdminClient is a client of the cluster's API as its administrator, which a control plane
// is.
func AdminClient(r resource.Reader) (*kubeclient.Client, error) {
	options, err := admin(r)
	if err != nil {
		return nil, err
	}
	return kubeclient.New(options)
}

// admin are the options of AdminClient. The configuration of a self-hosted control plane lacks the secrets for static
// pods.
func admin(r resource.Reader) (kubeclient.Options, error) {
	found, err := secrets.Kubernetes.Get(r, secrets.KubernetesID)
	if c, none := configuration.Config(r); err != nil && none == nil && c.SelfHosted() {
		found.Spec = secrets.KubernetesSpec{Trusted: c.Cluster.TrustedCAs(), Balancer: balancer.URL}
		found.Spec.Admin, err = secrets.Admin(c.Cluster.CA, time.Now())
	}
	return throughBalancer(found.Spec), err
}

// ServesAt says why no API server of this cluster is at a URL, or none whose certificate has a name. "" is the name in
// the URL.
func ServesAt(ctx context.Context, r resource.Reader, url, name string) error {
	there := func(o *kubeclient.Options) { o.Server, o.ServerName = url, name }
	return asAdmin(r, there, func(c *kubeclient.Client) error { return c.Ready(ctx) })
}

// Metrics are those of the API server of one node, in the text format of Prometheus.
func Metrics(ctx context.Context, r resource.Reader, node netip.Addr) (text string, err error) {
	err = onNode(r, node, func(*kubeclient.Options) {}, func(c *kubeclient.Client) error {
		text, err = c.Text(ctx, "/metrics")
		return err
	})
	return text, err
}

// AcceptedBy asks the API server of one node with an administrator's certificate of an
// authority: it fails if the API server doesn't accept that one.
func AcceptedBy(ctx context.Context, r resource.Reader, node netip.Addr, ca config.CertKey) error {
	pair, err := secrets.Admin(ca, time.Now())
	if err != nil {
		return err
	}
	as := func(o *kubeclient.Options) { o.Cert, o.Key = pair.Crt, pair.Key }
	return onNode(r, node, as, func(c *kubeclient.Client) error {
		_, err := c.Raw(ctx, "/api")
		return err
	})
}

// onNode calls do with a client of the API server of one node, as the cluster's administrator unless as changes that.
func onNode(r resource.Reader, node netip.Addr, as func(*kubeclient.Options), do func(*kubeclient.Client) error) error {
	own, err := Configs.Get(r, apiServer)
	if err != nil {
		return err
	}
	return asAdmin(r, func(o *kubeclient.Options) {
		o.Server = "https://" + netip.AddrPortFrom(node, uint16(own.Spec.(APIServerConfig).LocalPort)).String()
		as(o)
	}, do)
}

// asAdmin calls do with a client of the cluster's administrator, whose options were changed.
func asAdmin(r resource.Reader, change func(*kubeclient.Options), do func(*kubeclient.Client) error) error {
	options, err := admin(r)
	if err != nil {
		return err
	}
	change(&options)
	client, err := kubeclient.New(options)
	if err != nil {
		return err
	}
	defer client.Close()
	return do(client)
}

// throughBalancer is for this node's own apiserver, or another one while that isn't ready, with all rights.
func throughBalancer(s secrets.KubernetesSpec) kubeclient.Options {
	return s.Administrator(s.Balancer, balancer.ServerName)
}

// withMutex runs do while this node holds the mutex of the cluster.
func withMutex(ctx context.Context, r resource.Reader, endpoint string, do func(ctx context.Context, kv clientv3.KV) error) (err error) {
	// The release of the mutex has to work after the end of ctx, for a short time.
	own, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(releaseBudget, end) })()
	client, err := etcd.Dial(own, r, endpoint)
	if err != nil {
		return err
	}
	defer client.Close()
	session, err := concurrency.NewSession(client, concurrency.WithTTL(applyTTL), concurrency.WithContext(own))
	if err != nil {
		return fmt.Errorf("etcd session at %s: %w", endpoint, err)
	}
	defer session.Close() // it also releases the mutex
	mutex := concurrency.NewMutex(session, applyMutex)
	if err := mutex.Lock(ctx); err != nil {
		return fmt.Errorf("lock etcd mutex %s: %w", applyMutex, err)
	}
	// If the session is lost, so is the mutex, and the work must stop.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(session.Ctx(), cancel)()
	return do(ctx, client)
}
