{{- define "kpl.selector" -}}
app.kubernetes.io/name: kpl-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kpl.labels" -}}
{{ include "kpl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kpl.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary .Release.Name "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "kpl.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* http or https: the name of the port, and the scheme in lower case. */}}
{{- define "kpl.scheme" -}}
{{ ternary "https" "http" (ne .Values.tls.secretName "") }}
{{- end }}

{{- define "kpl.servicePort" -}}
{{ .Values.service.port | default (ternary 443 80 (ne .Values.tls.secretName "")) | int }}
{{- end }}

{{/* Not empty if the replicas share a store. */}}
{{- define "kpl.store" -}}
{{ .Values.coordination.secretName | default .Values.coordination.url }}
{{- end }}

{{/* The most pods that run at the same time: a StatefulSet ends a pod before it starts the next version of it. */}}
{{- define "kpl.mostPods" -}}
{{ ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled | int }}
{{- end }}

{{/* What the schema cannot check, because it concerns two values. */}}
{{- define "kpl.check" -}}
{{- $processes := mul (include "kpl.mostPods" . | int) (int .Values.workers) }}
{{- if and .Values.coordination.secretName .Values.coordination.url }}
{{- fail "coordination.secretName and coordination.url exclude each other; give one of them" }}
{{- end }}
{{- if and (include "kpl.store" .) (gt $processes (int64 .Values.coordination.maxProcesses)) }}
{{- fail (printf "coordination.maxProcesses is %d, but %d processes may run (pods times workers); raise it" (int64 .Values.coordination.maxProcesses) $processes) }}
{{- end }}
{{- if .Values.autoscaling.enabled }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" }}
{{- end }}
{{- if and .Values.resources (not (dig "requests" "cpu" "" .Values.resources)) (not (dig "limits" "cpu" "" .Values.resources)) }}
{{- fail "autoscaling compares the CPU with what the pods request; give resources.requests.cpu" }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.hosts is required: --set ingress.hosts={ingest.example.com}" }}
{{- end }}
{{- end }}

{{/* MiB of memory: the figures of the page "Size the ingest gateway", for all workers of a pod. */}}
{{- define "kpl.memoryRequest" -}}
{{ mul (int .Values.workers) (add 100 (div (mul 4 (int64 .Values.maxOutstandingBytes)) 1048576)) }}
{{- end }}
{{- define "kpl.memoryLimit" -}}
{{ div (mul 6 (add (include "kpl.memoryRequest" . | int64) (mul (int .Values.workers) 256))) 5 }}
{{- end }}
