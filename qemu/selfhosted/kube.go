package selfhosted

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/garboard-os/garboard/qemu"
)

const namespace = "kube-system"

// object is an object of Kubernetes, or a part of one.
type object = map[string]any

// kube is a client of the Kubernetes API.
type kube struct{ *qemu.KubeAPI }

// statusError is an answer of the API server that isn't a success.
type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return e.text }

// refused reports whether the same request would be refused again.
func refused(err error) bool {
	status, ok := errors.AsType[*statusError](err)
	return ok && (status.code == http.StatusBadRequest || status.code == http.StatusUnprocessableEntity)
}

// collections are the paths of the kinds that are made here.
var collections = map[string]string{
	"Secret":             "/api/v1/namespaces/" + namespace + "/secrets/",
	"Pod":                "/api/v1/namespaces/" + namespace + "/pods/",
	"DaemonSet":          "/apis/apps/v1/namespaces/" + namespace + "/daemonsets/",
	"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles/",
	"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/",
}

func pathOf(o object) string {
	return collections[o["kind"].(string)] + o["metadata"].(object)["name"].(string)
}

func (k *kube) do(ctx context.Context, method, path string, body any, to any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	header := http.Header{"Content-Type": {"application/apply-patch+yaml"}} // JSON is YAML
	resp, answer, err := k.Request(ctx, method, path, header, text)
	if err != nil {
		return err
	}
	if resp.StatusCode >= http.StatusMultipleChoices {
		var status struct{ Message string }
		_ = json.Unmarshal(answer, &status)
		return &statusError{resp.StatusCode, fmt.Sprintf("%s %s: %s: %s", method, path, resp.Status, status.Message)}
	}
	if to == nil {
		return nil
	}
	return json.Unmarshal(answer, to)
}

// apply makes an object, or changes it (server-side apply).
func (k *kube) apply(ctx context.Context, o object) error {
	return k.do(ctx, http.MethodPatch, pathOf(o)+"?fieldManager=garboard-selfhosted&force=true", o, nil)
}

// remove deletes an object.
func (k *kube) remove(ctx context.Context, o object) error {
	err := k.do(ctx, http.MethodDelete, pathOf(o), nil, nil)
	if status, ok := errors.AsType[*statusError](err); ok && status.code == http.StatusNotFound {
		return nil
	}
	return err
}

// succeeded returns nil once a pod has succeeded.
func (k *kube) succeeded(ctx context.Context, pod object) error {
	var o struct {
		Status struct{ Phase string }
	}
	if err := k.do(ctx, http.MethodGet, pathOf(pod), nil, &o); err != nil {
		return err
	}
	if o.Status.Phase != "Succeeded" {
		return fmt.Errorf("%s is %s: 'kubectl -n %s logs %s' may show why", pathOf(pod), o.Status.Phase, namespace, pod["metadata"].(object)["name"])
	}
	return nil
}

// allReady returns nil if a DaemonSet has a ready pod on each control plane.
func (k *kube) allReady(ctx context.Context, daemonSet string, count int) error {
	var o struct {
		Status struct{ DesiredNumberScheduled, NumberReady int }
	}
	if err := k.do(ctx, http.MethodGet, collections["DaemonSet"]+daemonSet, nil, &o); err != nil {
		return err
	}
	if o.Status.DesiredNumberScheduled != count || o.Status.NumberReady != count {
		return fmt.Errorf("DaemonSet %s: %d of %d pods are ready on %d control planes", daemonSet, o.Status.NumberReady, o.Status.DesiredNumberScheduled, count)
	}
	return nil
}
