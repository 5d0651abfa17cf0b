//go:build e2e

package clientgo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	webPort  = 8080
	etcdPort = 2379
	// nodePort is a fixed port of the cluster's range (30000-32767).
	nodePort = 30080
	// requestTimeout of one HTTP request, one or two hops away.
	requestTimeout = 5 * time.Second
)

var one int64 = 1

// web are two pods, one on each worker, that serve their name. kubectl's proxy
// is a small HTTP server of files, and kubectl a small HTTP client: the image
// has no shell, and needs none.
func web(replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": "web"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: &one,
					TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{
						MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.ScheduleAnyway,
						LabelSelector: &metav1.LabelSelector{MatchLabels: labels},
					}},
					Containers: []corev1.Container{{
						Name: "web", Image: os.Getenv("GARBOARD_WEB_IMAGE"),
						Command: []string{"/usr/local/bin/kubectl", "proxy", "--address=0.0.0.0", fmt.Sprintf("--port=%d", webPort),
							"--accept-hosts=.*", "--www=/etc/pod", "--www-prefix=/pod/"},
						ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 5, ProbeHandler: corev1.ProbeHandler{
							HTTPGet: &corev1.HTTPGetAction{Path: "/pod/name", Port: intstr.FromInt32(webPort)},
						}},
						VolumeMounts: []corev1.VolumeMount{{Name: "pod", MountPath: "/etc/pod"}},
					}},
					Volumes: []corev1.Volume{{Name: "pod", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{
						Items: []corev1.DownwardAPIVolumeFile{{Path: "name", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
					}}}},
				},
			},
		},
	}
}

// deploy makes a Deployment and waits for its pods.
func (c *cluster) deploy(replicas int32) []corev1.Pod {
	c.t.Helper()
	if _, err := c.client.AppsV1().Deployments(c.space).Create(c.t.Context(), web(replicas), metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	return c.ready(startBudget, "web", int(replicas))
}

func (c *cluster) serve(s *corev1.Service) *corev1.Service {
	c.t.Helper()
	made, err := c.client.CoreV1().Services(c.space).Create(c.t.Context(), s, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return made
}

func TestServices(t *testing.T) {
	c := connect(t, "services")
	pods := c.deploy(2)
	if pods[0].Spec.NodeName == pods[1].Spec.NodeName {
		t.Fatalf("both pods are on %s", pods[0].Spec.NodeName)
	}
	s := c.serve(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeNodePort, Selector: map[string]string{"app": "web"},
		Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(webPort), NodePort: nodePort}},
	}})
	names := []string{pods[0].Name, pods[1].Name}

	t.Run("pods reach pods on other nodes", func(t *testing.T) {
		c := c.in(t)
		for i, from := range pods {
			to := pods[1-i]
			c.eventually(knownBudget, from.Name+" reaches "+to.Name, func(ctx context.Context) error {
				return c.answers(ctx, from.Name, fmt.Sprintf("http://%s:%d", to.Status.PodIP, webPort), to.Name)
			})
		}
	})
	t.Run("ClusterIP", func(t *testing.T) {
		c := c.in(t)
		for i, from := range pods {
			// Of two that answer in turn, one is on the other node.
			c.eventually(knownBudget, "from "+from.Name+" the Service leads to "+pods[1-i].Name, func(ctx context.Context) error {
				return c.answers(ctx, from.Name, "http://"+s.Spec.ClusterIP, pods[1-i].Name)
			})
		}
	})
	t.Run("NodePort", func(t *testing.T) {
		c := c.in(t)
		nodes, err := c.client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range nodes.Items { // also the control plane, which has no pod
			url := fmt.Sprintf("http://%s:%d/pod/name", address(n), nodePort)
			c.eventually(knownBudget, url+" answers", func(ctx context.Context) error {
				name, err := get(ctx, url)
				if err == nil && !slices.Contains(names, name) {
					err = fmt.Errorf("%q answers", name)
				}
				return err
			})
		}
	})
	t.Run("nobody behind it", func(t *testing.T) {
		c := c.in(t)
		empty := c.serve(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "empty"}, Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "nobody"}, Ports: []corev1.ServicePort{{Port: 80}},
		}})
		c.eventually(knownBudget, "a Service with nobody behind it refuses", func(ctx context.Context) error {
			err := c.answers(ctx, pods[0].Name, "http://"+empty.Spec.ClusterIP, "")
			if err == nil || !strings.Contains(err.Error(), "refused") {
				return fmt.Errorf("it doesn't: %v", err)
			}
			return nil
		})
	})
}

// answers requests a URL from a pod, and compares the answer.
func (c *cluster) answers(ctx context.Context, from, url, want string) error {
	out, err := c.exec(ctx, from, "/usr/local/bin/kubectl", "--server="+url, "--request-timeout="+requestTimeout.String(), "get", "--raw", "/pod/name")
	if err == nil && out != want {
		err = fmt.Errorf("%s answers %q, not %q", url, out, want)
	}
	return err
}

// get is an HTTP request from this machine.
func get(ctx context.Context, url string) (string, error) {
	client := &http.Client{Timeout: requestTimeout, Transport: &http.Transport{DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	return string(text), err
}

func address(n corev1.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return a.Address
		}
	}
	return ""
}

// store is an etcd of the user's own, with its data in a directory of the node.
func store(node string) *appsv1.StatefulSet {
	labels := map[string]string{"app": "store"}
	kind := corev1.HostPathDirectoryOrCreate
	listen := fmt.Sprintf("http://0.0.0.0:%d", etcdPort)
	return &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "store"},
		Spec: appsv1.StatefulSetSpec{
			ServiceName: "store",
			Selector:    &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					TerminationGracePeriodSeconds: &one,
					// the node with its data
					NodeSelector: map[string]string{corev1.LabelHostname: node},
					Containers: []corev1.Container{{
						Name: "store", Image: os.Getenv("GARBOARD_ETCD_IMAGE"),
						Command: []string{"/usr/local/bin/etcd", "--data-dir=/data/etcd", "--listen-client-urls=" + listen, "--advertise-client-urls=" + listen},
						ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 5, ProbeHandler: corev1.ProbeHandler{
							HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(etcdPort)},
						}},
						VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}},
					}},
					Volumes: []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
						HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/store", Type: &kind},
					}}},
				},
			},
		},
	}
}

func TestStatefulSet(t *testing.T) {
	c := connect(t, "stateful")
	if _, err := c.client.AppsV1().StatefulSets(c.space).Create(t.Context(), store(c.workers[0]), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.serve(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "store"}, Spec: corev1.ServiceSpec{
		ClusterIP: corev1.ClusterIPNone, Selector: map[string]string{"app": "store"}, Ports: []corev1.ServicePort{{Port: etcdPort}},
	}})
	first := c.ready(startBudget, "store", 1)[0]
	if out, err := c.exec(t.Context(), first.Name, "/usr/local/bin/etcdctl", "put", "kept", "over the pod's end"); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if err := c.client.CoreV1().Pods(c.space).Delete(t.Context(), first.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	var second corev1.Pod
	c.eventually(replaceBudget, "another pod has taken its name", func(ctx context.Context) error {
		pods, err := c.pods(ctx, "store")
		if err != nil {
			return err
		}
		if len(pods) != 1 || pods[0].UID == first.UID || !isReady(pods[0]) {
			return errors.New("not yet")
		}
		second = pods[0]
		return nil
	})
	if second.Name != "store-0" || second.Spec.NodeName != first.Spec.NodeName {
		t.Errorf("it is %s on %s, not store-0 on %s", second.Name, second.Spec.NodeName, first.Spec.NodeName)
	}
	// By the DNS name of a StatefulSet's pod.
	name := "http://" + net.JoinHostPort("store-0.store", fmt.Sprint(etcdPort))
	c.eventually(knownBudget, "it has what the first one wrote", func(ctx context.Context) error {
		out, err := c.exec(ctx, second.Name, "/usr/local/bin/etcdctl", "--endpoints="+name, "get", "--print-value-only", "kept")
		if err == nil && strings.TrimSpace(out) != "over the pod's end" {
			err = fmt.Errorf("it has %q", out)
		}
		return err
	})
}

// Directories of the node that pods mount are from the node, not from the
// kubelet's own file system: a part of a volume, and a directory that must
// exist.
func TestHostPath(t *testing.T) {
	c := connect(t, "host-path")
	begin := func(name, path string, kind corev1.HostPathType, part string) {
		t.Helper()
		pod := store(c.workers[0]).Spec.Template
		pod.Name = name
		pod.Spec.Volumes[0].HostPath = &corev1.HostPathVolumeSource{Path: path, Type: &kind}
		pod.Spec.Containers[0].VolumeMounts[0].SubPath = part
		if _, err := c.client.CoreV1().Pods(c.space).Create(t.Context(), &corev1.Pod{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		c.ready(startBudget, "store", 1)
	}
	begin("part", "/var/lib/parts", corev1.HostPathDirectoryOrCreate, "one")
	if out, err := c.exec(t.Context(), "part", "/usr/local/bin/etcdctl", "put", "kept", "in a part"); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	if err := c.client.CoreV1().Pods(c.space).Delete(t.Context(), "part", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	c.ready(replaceBudget, "store", 0)
	begin("whole", "/var/lib/parts/one", corev1.HostPathDirectory, "")
	if out, err := c.exec(t.Context(), "whole", "/usr/local/bin/etcdctl", "get", "--print-value-only", "kept"); err != nil || strings.TrimSpace(out) != "in a part" {
		t.Errorf("on the node there is %q (%v)", out, err)
	}
	// Negative twin: a directory that doesn't exist.
	kind := corev1.HostPathDirectory
	pod := store(c.workers[0]).Spec.Template
	pod.Name, pod.Labels = "nowhere", nil
	pod.Spec.Volumes[0].HostPath = &corev1.HostPathVolumeSource{Path: "/var/lib/nowhere", Type: &kind}
	if _, err := c.client.CoreV1().Pods(c.space).Create(t.Context(), &corev1.Pod{ObjectMeta: pod.ObjectMeta, Spec: pod.Spec}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.eventually(startBudget, "the event says that it isn't there", func(ctx context.Context) error {
		events, err := c.client.CoreV1().Events(c.space).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=nowhere,reason=FailedMount"})
		if err == nil && (len(events.Items) == 0 || !strings.Contains(events.Items[0].Message, "is not a directory")) {
			err = fmt.Errorf("the events are %v", events.Items)
		}
		return err
	})
}
