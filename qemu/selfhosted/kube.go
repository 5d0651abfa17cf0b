package selfhosted

import (
	"context"
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

// refused reports whether the same request would be refused again.
func refused(err error) bool {
	status, ok := errors.AsType[*qemu.StatusError](err)
	return ok && (status.Code == http.StatusBadRequest || status.Code == http.StatusUnprocessableEntity)
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

// apply makes an object, or changes it (server-side apply).
func (k *kube) apply(ctx context.Context, o object) error {
	return k.Do(ctx, http.MethodPatch, pathOf(o)+"?fieldManager=garboard-selfhosted&force=true", o, nil)
}

// remove deletes an object.
func (k *kube) remove(ctx context.Context, o object) error {
	err := k.Do(ctx, http.MethodDelete, pathOf(o), nil, nil)
	if status, ok := errors.AsType[*qemu.StatusError](err); ok && status.Code == http.StatusNotFound {
		return nil
	}
	return err
}

// succeeded returns nil once a pod has succeeded.
func (k *kube) succeeded(ctx context.Context, pod object) error {
	var o struct {
		Status struct{ Phase string }
	}
	if err := k.Do(ctx, http.MethodGet, pathOf(pod), nil, &o); err != nil {
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
	if err := k.Do(ctx, http.MethodGet, collections["DaemonSet"]+daemonSet, nil, &o); err != nil {
		return err
	}
	if o.Status.DesiredNumberScheduled != count || o.Status.NumberReady != count {
		return fmt.Errorf("DaemonSet %s: %d of %d pods are ready on %d control planes", daemonSet, o.Status.NumberReady, o.Status.DesiredNumberScheduled, count)
	}
	return nil
}
